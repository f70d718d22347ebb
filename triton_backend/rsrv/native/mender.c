#include <signal.h>

#include "link.h"

// A thread that reconnects the links of one device. Each device has such a thread, so that a runtime that hangs does not delay
// other devices. The list has the links in the order of their arrival. The first link that is due is reconnected next.
struct mender {
    bool begun;
    atomic_bool fails;  // the latest attempt, for whichever model, failed
    pthread_cond_t changed;
    struct link *first_due, *last_due;
};

// All models in this process share this lock and the menders.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mender menders[MAX_DEVICES];

void mender_add(struct link* link) {
    struct mender* mender = &menders[link->number];
    link_hold(link);
    link->next_due = NULL;
    pthread_mutex_lock(&lock);
    *(mender->last_due ? &mender->last_due->next_due : &mender->first_due) = link;
    mender->last_due = link;
    pthread_cond_signal(&mender->changed);
    pthread_mutex_unlock(&lock);
}

bool mender_fails(uint32_t device) { return atomic_load(&menders[device].fails); }

static struct link* take_due(struct mender* mender) {
    pthread_mutex_lock(&lock);
    for (;;) {
        int64_t now = now_ns(), soonest = INT64_MAX;
        // `due_ns` does not change while a link is in the list.
        for (struct link *link = mender->first_due, *before = NULL; link; before = link, link = link->next_due) {
            if (link->due_ns <= now) {
                *(before ? &before->next_due : &mender->first_due) = link->next_due;
                if (!link->next_due) mender->last_due = before;
                pthread_mutex_unlock(&lock);
                return link;
            }
            soonest = link->due_ns < soonest ? link->due_ns : soonest;
        }
        struct timespec until = {soonest / NS_PER_S, soonest % NS_PER_S};
        if (soonest == INT64_MAX)
            pthread_cond_wait(&mender->changed, &lock);
        else
            pthread_cond_timedwait(&mender->changed, &lock, &until);
    }
}

static void* mend_all(void* mender_of_device) {
    struct mender* mender = mender_of_device;
    for (;;) {
        struct link* link = take_due(mender);
        if (!link_reconnect(link, &mender->fails)) mender_add(link);
        link_drop(link);
    }
    return NULL;
}

bool mender_begin(uint32_t device) {
    struct mender* mender = &menders[device];
    pthread_mutex_lock(&lock);
    if (!mender->begun) {
        begin_condition(&mender->changed);
        mender->begun = begin_thread(mend_all, mender);
    }
    bool is_begun = mender->begun;
    pthread_mutex_unlock(&lock);
    return is_begun;
}

bool begin_thread(void* (*run)(void*), void* argument) {
    pthread_t thread;
    pthread_attr_t detached;
    sigset_t all, before;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    // Block all signals, because they are for the server's own threads.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool created = pthread_create(&thread, &detached, run, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return created;
}

void begin_condition(pthread_cond_t* condition) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &clock);
    pthread_condattr_destroy(&clock);
}
