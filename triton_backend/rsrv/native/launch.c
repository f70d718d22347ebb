#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

extern char** environ;

// Returns the clock ticks from boot to the start of this process, or 0 if the system does not report them. The file is
// read only once, because a read is slow: the kernel adds up the times of all threads, and a server has a thread for
// each of thousands of models.
static unsigned long start_time(void) {
    static atomic_ulong known;
    char line[1024];
    unsigned long ticks = atomic_load(&known);
    if (ticks) return ticks;
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    if (fd >= 0) close(fd);
    line[length > 0 ? length : 0] = 0;
    char* at = strrchr(line, ')');
    // The second field, the process's name, may contain any character, so start after its parenthesis. The 22nd field is
    // the start time.
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    if (at) ticks = strtoul(at, NULL, 10);
    atomic_store(&known, ticks);
    return ticks;
}

static bool make_private(const char* directory, struct text* why) {
    struct stat found;
    if (mkdir(directory, 0700) == 0) return true;
    bool exists = errno == EEXIST;
    if (exists && lstat(directory, &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == getuid() &&
        !(found.st_mode & 077))
        return true;
    if (!exists)
        text_add(why, "%s cannot be created: %s", directory, strerror(errno));
    else
        text_add(why, NOT_PRIVATE, directory, (unsigned)getuid());
    return false;
}

// Makes the directories above `path`. They need not be private.
static void make_parents(const char* path) {
    char part[PATH_BYTES];
    for (const char* end = strchr(path + 1, '/'); end; end = strchr(end + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(end - path), path);
        mkdir(part, 0700);
    }
}

bool runtime_directory(uint32_t device, char base[PATH_BYTES], char own[PATH_BYTES]) {
    const char *chosen = getenv("RSRV_RUNTIME_DIR"), *run = getenv("XDG_RUNTIME_DIR");
    int length = chosen && *chosen ? snprintf(base, PATH_BYTES, "%s", chosen)
                                   : snprintf(base, PATH_BYTES, "%s/rsrv-%u", run && *run ? run : "/tmp", (unsigned)getuid());
    int more = snprintf(own, PATH_BYTES, "%s/%d-%lu-gpu%u", base, (int)getpid(), start_time(), device);
    return length < PATH_BYTES && more < PATH_BYTES;
}

// Returns a socket, or -1 and sets errno: ENOENT and ECONNREFUSED mean that no runtime listens.
static int connect_to(const char* directory) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (snprintf(address.sun_path, sizeof address.sun_path, "%s/runtime.sock", directory) >= (int)sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr*)&address, sizeof address) == 0) {
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == getuid()) return fd;
        errno = EPERM;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static bool nobody_listens(void) { return errno == ENOENT || errno == ECONNREFUSED || errno == ECONNRESET; }

// Exchanges the first frames. The runtime checks the versions, so this front ignores the body of the runtime's answer.
static bool greet(int fd, struct greeted* greeted, struct text* why, bool* final) {
    struct text hello;
    uint8_t* buffer = malloc(MAX_FRAME);
    struct frame frame = {.fd = -1};
    const char* reason = DOES_NOT_READ;
    text_clear(&hello);
    text_add(&hello, "{\"magic\":%d,\"version\":%d}", MAGIC, PROTOCOL_VERSION);
    int found = buffer ? frame_send_json(fd, FRAME_HELLO, hello.bytes) : 0;
    if (found > 0) {
        struct pollfd readable = {fd, POLLIN, 0};
        int64_t until = now_ns() + GREETING_TIMEOUT_NS;
        do {
            poll(&readable, 1, 1000);
            found = frame_receive(fd, buffer, &frame, &reason);
        } while (found == 0 && now_ns() < until);
        if (found == 0) {
            text_add(why, NOT_ACCEPTED, (double)GREETING_TIMEOUT_NS / NS_PER_S);
            *final = true;
        } else if (found < 0)
            text_add(why, "%s; if this error repeats, install the same rsrv for the native front and for the runtime", reason);
        else if (frame.kind != FRAME_WELCOME)
            text_add(why, FOREIGN_PEER);
    } else
        text_add(why, "%s", reason);
    free(buffer);
    if (found > 0 && frame.kind == FRAME_WELCOME) {
        uint32_t devices = frame.count < 1 ? 1 : frame.count > MAX_DEVICES ? MAX_DEVICES : frame.count;
        *greeted = (struct greeted){fd, frame.fd, devices};
        return true;
    }
    if (frame.fd >= 0) close(frame.fd);
    close(fd);
    return false;
}

// --- starting a runtime ---------------------------------------------------------------------------------------------

// Finds the interpreter as a shell would, because execve takes a path.
static bool find_python(char path[PATH_BYTES]) {
    const char *chosen = getenv("RSRV_RUNTIME_PYTHON"), *search = getenv("PATH");
    const char* name = chosen && *chosen ? chosen : "python3";
    snprintf(path, PATH_BYTES, "%s", name);
    if (strchr(name, '/')) return access(path, X_OK) == 0;
    for (const char* at = search ? search : "/usr/bin:/bin"; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        snprintf(path, PATH_BYTES, "%.*s/%s", (int)strcspn(at, ":"), at, name);
        if (access(path, X_OK) == 0) return true;
    }
    snprintf(path, PATH_BYTES, "%s", name);
    return false;
}

// Runs a program, and returns its pid or -1. The program inherits stdout, stderr and `kept`. It inherits no other descriptor,
// because Triton's ports must be closed when Triton ends. vfork is used, because fork would run handlers that libraries such as
// gRPC have registered in this process.
static pid_t spawn(const char* program, char* const arguments[], int kept) {
    sigset_t all, before;
    // Block signals: the child shares this memory until execve, so no signal handler of the server may run in it.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pid_t child = vfork();
    if (child == 0) {
        struct sigaction standard = {.sa_handler = SIG_DFL};
        sigset_t none;
        for (int number = 1; number < NSIG; number++) sigaction(number, &standard, NULL);
        int nothing = open("/dev/null", O_RDONLY);
        if (nothing >= 0) dup2(nothing, 0);
        if (dup2(kept, 3) == 3) fcntl(3, F_SETFD, 0);
        if (syscall(SYS_close_range, 4u, ~0u, 0u) != 0)
            for (int fd = 4; fd < 65536; fd++) close(fd);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(program, arguments, environ);
        _exit(127);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return child;
}

static bool start(const char* directory, const char* settings, uint32_t device, struct text* why, bool* final) {
    char python[PATH_BYTES], number[12], pid[24], message[1024] = "";
    int ends[2], status = -1;
    *final = true;
    if (!find_python(python)) {
        text_add(why, CANNOT_START, python, strerror(ENOENT));
        return false;
    }
    if (pipe2(ends, O_CLOEXEC) != 0) {
        text_add(why, "the runtime cannot be started: %s", strerror(errno));
        return false;
    }
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    snprintf(number, sizeof number, "%u", device);
    // With -P, files in the server's working directory do not shadow modules. Descriptor 3 of the child is the pipe's end.
    char* const arguments[] = {python, "-P", "-m", "rsrv.runtime", "--directory", (char*)directory, "--server-pid", pid,
                               "--settings", (char*)settings, "--device", number, "--ready-fd", "3", NULL};
    pid_t child = spawn(python, arguments, ends[1]);
    close(ends[1]);
    ssize_t length = 0;
    if (child > 0) {
        struct pollfd readable = {ends[0], POLLIN, 0};
        int64_t until = now_ns() + START_TIMEOUT_NS;
        int ready;
        do
            ready = poll(&readable, 1, (int)((until - now_ns()) / (NS_PER_S / 1000)) + 1);
        while (ready < 0 && errno == EINTR);
        length = ready > 0 ? read(ends[0], message, sizeof message - 1) : snprintf(message, sizeof message, NOT_READY);
        message[length > 0 ? length : 0] = 0;
        if (ready == 0) kill(child, SIGKILL);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    }
    close(ends[0]);
    if (strcmp(message, "ready") == 0) return true;
    if (length == 0 && WIFSIGNALED(status)) {
        text_add(why, WAS_KILLED);
        *final = false;
    } else if (length > 0)
        text_add(why, DID_NOT_START, message);
    else
        text_add(why, ENDED_SILENTLY, python);
    return false;
}

// Returns true, and the reason, if a start of the runtime failed a short time ago. The caller then does not try again: otherwise,
// a card that another server holds would delay every load. Device 0 is always tried, because it may be the only device.
static bool has_failed(const char* path, uint32_t device, struct text* why) {
    struct stat found;
    char reason[1024];
    int fd = device ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return false;
    int64_t age_s = fstat(fd, &found) == 0 ? (int64_t)time(NULL) - found.st_mtim.tv_sec : -1;
    bool counts = age_s >= 0 && age_s < FAILURE_COUNTS_NS / NS_PER_S;
    ssize_t length = counts ? read(fd, reason, sizeof reason) : 0;
    if (length > 0) text_add_bytes(why, reason, (size_t)length);
    close(fd);
    return counts;
}

// Writes the reason of a failed start to a file, which other fronts and the control process read. The file is replaced as
// a whole, so they never read a part of a reason.
static void write_failure(const char* path, const struct text* why) {
    char beside[PATH_BYTES + 32];
    snprintf(beside, sizeof beside, "%s.new", path);
    int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return;
    bool is_whole = write(fd, why->bytes, why->length) == (ssize_t)why->length;
    close(fd);
    if (!is_whole || rename(beside, path) != 0) unlink(beside);
}

static bool start_unless_failed(
    const char* directory, const char* settings, uint32_t device, struct text* why, bool* final) {
    char path[PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s/" FAILURE_FILE, directory);
    *final = true;
    if (has_failed(path, device, why)) return false;
    bool started = start(directory, settings, device, why, final);
    if (started)
        unlink(path);
    else if (*final)
        write_failure(path, why);
    return started;
}

// Connects to a started runtime, and waits until the runtime listens. If another process started the runtime and died, the
// runtime may not listen yet.
static int connect_soon(const char* directory) {
    int64_t until = now_ns() + START_TIMEOUT_NS;
    for (;;) {
        int fd = connect_to(directory);
        if (fd >= 0 || !nobody_listens() || now_ns() > until) return fd;
        usleep(50000);
    }
}

bool runtime_open(const char* settings, uint32_t device, struct greeted* greeted, struct text* why, bool* final) {
    char base[PATH_BYTES], own[PATH_BYTES], lock_path[PATH_BYTES + 8];
    *final = true;
    if (!runtime_directory(device, base, own)) {
        text_add(why, "the path of the runtime's directory is too long; set RSRV_RUNTIME_DIR to a shorter one");
        return false;
    }
    int fd = connect_to(own);
    if (fd < 0 && nobody_listens()) {
        make_parents(base);
        if (!make_private(base, why) || !make_private(own, why)) return false;
        snprintf(lock_path, sizeof lock_path, "%s/lock", own);
        int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (lock < 0 || flock(lock, LOCK_EX) != 0) {
            text_add(why, "%s cannot be locked: %s", lock_path, strerror(errno));
            if (lock >= 0) close(lock);
            return false;
        }
        // The process or thread that holds the lock starts the runtime; the others wait here and find it listening.
        fd = connect_to(own);
        bool started = fd >= 0 || (nobody_listens() && start_unless_failed(own, settings, device, why, final));
        if (fd < 0 && started) fd = connect_soon(own);
        close(lock);
        if (!started && why->length) return false;
    }
    if (fd < 0) {
        text_add(why, "the runtime in %s cannot be reached: %s", own, strerror(errno));
        *final = false;
        return false;
    }
    *final = false;
    return greet(fd, greeted, why, final);
}
