// The live page: draws the server's stream of events. No library, nothing fetched from elsewhere.
// Everything that comes from outside becomes text (textContent), never markup.

const SECONDS = 30; // of the timeline
const MOST_SPANS = 50_000; // of a device, in the timeline
const MOST_LINES = 200; // of the log
const SILENCE = 5; // seconds without figures of a device until the page says so

const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// --- figures ------------------------------------------------------------------------------------------------

// As rsrv/text.py: three digits.
const digits = (value) => String(Number(value.toPrecision(3)));
const amount = (count, unit) => {
  let prefix = 0;
  for (; count >= 999.5 && prefix < 5; prefix++) count /= 1000;
  return `${digits(count)} ${["", "k", "M", "G", "T", "P"][prefix]}${unit}`.trim();
};
const bytes = (count) => (count == null ? "–" : amount(count, "B"));
const seconds = (value) => {
  if (value == null) return "–";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 60) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1) return `${digits(value)} s`;
  return value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
};
const rate = (value) => (value == null ? "–" : amount(value, ""));
const percent = (value) => (value == null ? "–" : `${digits(value * 100)}%`);
const colours = new Map();
const colour = (name) => {
  if (!colours.has(name)) {
    let hash = 0x811c9dc5;
    for (const character of name) hash = Math.imul(hash ^ character.codePointAt(0), 0x01000193);
    // Names that differ in their last character shall not look alike.
    hash = Math.imul(hash ^ (hash >>> 15), 0x2c1b3c6d) >>> 0;
    colours.set(name, `hsl(${hash % 360} ${45 + (hash >>> 9) % 25}% ${45 + (hash >>> 17) % 15}%)`);
  }
  return colours.get(name);
};

// --- state --------------------------------------------------------------------------------------------------

/** By name: {state, devices, seen}; devices, by number: {card, spans, busy}. Counters become rates by the state before. */
const servers = new Map();
/** By `server/model`: its figures, and its row of the table. */
const rows = new Map();
const sorting = { column: "share", down: true };
let shown = null;
let writable = false;

const known = (name) => {
  if (!servers.has(name)) servers.set(name, { devices: new Map(), state: null, seen: 0 });
  return servers.get(name);
};
const deviceOf = (server, number) => {
  if (!server.devices.has(number)) server.devices.set(number, { card: null, spans: [], busy: null });
  return server.devices.get(number);
};
const generates = () => [...rows.values()].some((row) => row.tokens);
const several = () => [...servers.values()].some((server) => server.devices.size > 1);

function take(state) {
  const server = known(state.server);
  const before = server.state;
  server.state = state;
  if (!state.up) return; // the last known figures stay
  const elapsed = before && before.instance === state.instance ? state.t - before.t : 0;
  const old = new Map(elapsed > 0 && before.models ? before.models.map((model) => [model.name, model]) : []);
  for (const device of state.devices) {
    const last = elapsed > 0 ? before.devices?.find((one) => one.number === device.number)?.device_s : null;
    deviceOf(server, device.number).busy = last == null || device.device_s == null ? null : Math.min(1, Math.max(0, (device.device_s - last) / elapsed));
  }
  for (const [number, device] of server.devices) {
    if (!state.devices.some((one) => one.number === number)) {
      device.card?.root.remove();
      server.devices.delete(number);
    }
  }
  const seen = new Set();
  for (const model of state.models) {
    const key = `${state.server}/${model.name}`;
    const last = old.get(model.name);
    const per = (name) => (last ? Math.max(0, (model[name] - last[name]) / elapsed) : null);
    const row = rows.get(key) ?? { key, server: state.server };
    rows.set(key, row);
    Object.assign(row, model, { on: model.on.join(" "), rate: per("requests"), speed: per("tokens"), share: per("device_s"), loading: per("loads") });
    seen.add(key);
  }
  for (const [key, row] of rows) {
    if (row.server === state.server && !seen.has(key)) {
      row.element?.remove();
      rows.delete(key);
    }
  }
}

function takeSpans(server, spans) {
  for (const [kind, model, start, length, n, size, requests, failed, number] of spans) {
    deviceOf(known(server), number).spans.push({ kind, model, start, length, n, size, requests, failed, colour: colour(model) });
  }
  for (const { spans: kept } of known(server).devices.values()) {
    if (!kept.length) continue;
    const oldest = kept.at(-1).start - SECONDS - 5;
    let gone = Math.max(0, kept.length - MOST_SPANS);
    while (gone < kept.length && kept[gone].start + kept[gone].length < oldest) gone++;
    kept.splice(0, gone);
  }
}

// --- devices ------------------------------------------------------------------------------------------------

function drawDevices() {
  const cards = [];
  for (const name of [...servers.keys()].sort()) {
    const server = servers.get(name), { state } = server;
    if (!state) continue;
    if (!server.devices.size) deviceOf(server, 0); // it was never up
    for (const number of [...server.devices.keys()].sort((a, b) => a - b)) {
      const device = server.devices.get(number);
      const title = server.devices.size < 2 ? name : servers.size < 2 ? `device ${number}` : `${name}, device ${number}`;
      device.card ??= card(name, number);
      drawDevice(device, title, state, state.devices?.find((one) => one.number === number));
      cards.push(device.card);
    }
  }
  cards.forEach(({ root }, at) => {
    const there = $("devices").children[at];
    if (there !== root) $("devices").insertBefore(root, there ?? null);
  });
}

function drawDevice({ card, busy }, name, state, device) {
  const { root, title, facts, bar, canvas } = card;
  const up = state.up && device?.held != null;
  root.dataset.up = String(up);
  say(title, name);
  canvas.setAttribute("aria-label", `executions and loads of ${name}, last ${SECONDS} seconds`);
  if (!up) {
    say(facts, state.up ? `its runtime has not answered since ${new Date(device.down_since * 1000).toLocaleTimeString()}` : state.why);
    for (const part of Object.values(bar)) part.style.flexGrow = 0;
    return;
  }
  const whole = device.limit ?? device.budget ?? Math.max(device.held, device.physical, 1);
  const budget = device.budget ?? whole;
  const pinned = Math.min(device.pinned, device.held);
  const resident = Math.max(0, Math.min(device.held, device.physical) - pinned);
  const moving = Math.abs(device.physical - device.held);
  const shares = {
    pinned, resident, moving,
    free: Math.max(0, budget - pinned - resident - moving),
    scratch: Math.max(0, whole - budget),
  };
  for (const [kind, value] of Object.entries(shares)) {
    bar[kind].style.flexGrow = value / whole;
    bar[kind].title = `${kind}: ${bytes(value)}`;
  }
  const saved = device.logical > device.physical ? ` (${bytes(device.logical)} without sharing, ${percent(1 - device.physical / device.logical)} saved)` : "";
  say(facts, `${bytes(device.held)}${saved} of ${device.budget == null ? "no limit" : bytes(device.budget)} for weights · `
    + (device.card ? `GPU ${bytes(device.card.used_bytes)} of ${bytes(device.card.total_bytes)} in use · ` : "")
    + `busy ${percent(busy ?? 0)} · host ${bytes(device.host)}`);
}

function card(name, number) {
  const title = make("b"), facts = make("span");
  const bar = Object.fromEntries(["pinned", "resident", "moving", "free", "scratch"].map((kind) => [kind, make("i", { className: kind })]));
  const canvas = make("canvas");
  canvas.setAttribute("role", "img");
  canvas.addEventListener("mousemove", (event) => hint(name, number, canvas, event));
  const root = make("div", { className: "device" }, make("h3", {}, title, facts), make("div", { className: "bar" }, ...Object.values(bar)), canvas);
  Object.assign(root.dataset, { server: name, device: number });
  return { root, title, facts, bar, canvas };
}

/** Executions above, loads and evictions below; time goes to the right, and its end is now. */
function drawTimeline(server, { card, spans }) {
  const { canvas } = card;
  const width = canvas.clientWidth * devicePixelRatio, height = canvas.clientHeight * devicePixelRatio;
  if (!width) return;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  const { from, scale } = window_(server, width);
  const painted = new Map(); // by the top of a lane: to where it is full
  for (const span of spans) {
    const at = (span.start - from) * scale, end = at + Math.max(span.length * scale, devicePixelRatio);
    if (at > width || end < 0) continue;
    const [top, tall] = lane(span.kind, height);
    // Of thousands a second most would be in the same column of pixels.
    if (end <= (painted.get(top) ?? -1) && !span.failed) continue;
    painted.set(top, Math.ceil(end));
    context.fillStyle = span.colour;
    context.fillRect(at, top, end - at, tall);
    if (span.failed) {
      context.fillStyle = getComputedStyle(document.body).getPropertyValue("--bad");
      context.fillRect(at, top, end - at + devicePixelRatio, 3 * devicePixelRatio);
    }
  }
}

// The server's clock may differ from this one: the newest time of the stream is now.
const window_ = (server, width) => ({ from: (server.state.t ?? 0) + (performance.now() - server.seen) / 1000 - SECONDS, scale: width / SECONDS });
const lane = (kind, height) =>
  kind === "execute" || kind === "warm_up" ? [0, height * 0.62] : kind === "load" ? [height * 0.68, height * 0.32] : [height * 0.84, height * 0.16];

function hint(name, number, canvas, event) {
  const server = servers.get(name);
  const box = canvas.getBoundingClientRect();
  const { from, scale } = window_(server, box.width);
  const time = from + (event.clientX - box.left) / scale;
  const y = event.clientY - box.top;
  const hit = server.devices.get(number).spans.findLast((span) => {
    const [top, tall] = lane(span.kind, box.height);
    return y >= top && y <= top + tall && time >= span.start - 1 / scale && time <= span.start + span.length + 1 / scale;
  });
  canvas.title = hit
    ? `${hit.kind.replace("_", "-")} ${hit.model}, ${seconds(hit.length)}` + (hit.kind === "execute" ? `, ${hit.n} of ${hit.size} rows, ${hit.requests} requests` : "")
    : "";
}

// --- models -------------------------------------------------------------------------------------------------

const COLUMNS = [
  { id: "name", title: "model" },
  { id: "server", title: "server", hidden: () => servers.size < 2 },
  { id: "weights", title: "state", show: (row) => (row.state === "ready" && row.paused ? `paused (${row.paused})` : row.state === "ready" && row.residency === "device" ? `pinned, ${row.weights}` : row.weights) },
  { id: "on", title: "on", hidden: () => !several() },
  { id: "bytes", title: "size", number: true, show: (row) => (row.kind === "meta" ? "" : bytes(row.bytes)) },
  { id: "queued", title: "waiting", number: true, show: (row) => String(row.queued) },
  { id: "executing", title: "running", number: true, show: (row) => String(row.executing) },
  { id: "rate", title: "requests/s", number: true, show: (row) => rate(row.rate) },
  { id: "speed", title: "tokens/s", number: true, hidden: () => !generates(), show: (row) => (row.tokens ? rate(row.speed) : "") },
  { id: "share", title: "device", number: true, show: (row) => percent(row.share) },
  { id: "p99_s", title: "p99", number: true, show: (row) => seconds(row.p99_s) },
  { id: "load_s", title: "load", number: true, show: (row) => (row.loads ? seconds(row.load_s) : "") },
  { id: "loads", title: "loads", number: true, show: (row) => (row.kind === "meta" ? "" : String(row.loads)) },
  { id: "errors", title: "errors", number: true, show: (row) => String(row.errors) },
];

function drawHeader() {
  $("columns").replaceChildren(
    ...COLUMNS.map((column) => {
      const button = make("button", { type: "button", textContent: column.title });
      button.addEventListener("click", () => {
        sorting.down = sorting.column === column.id ? !sorting.down : column.number === true;
        sorting.column = column.id;
        drawHeader();
        drawModels();
      });
      const cell = make("th", { className: column.number ? "number" : "", hidden: column.hidden?.() ?? false, scope: "col" }, button);
      if (sorting.column === column.id) cell.ariaSort = sorting.down ? "descending" : "ascending";
      return cell;
    }),
  );
}

function drawModels() {
  const wanted = $("find").value.trim().toLowerCase(), busy = $("busy").checked;
  const shown = [...rows.values()].filter(
    (row) => row.name.toLowerCase().includes(wanted) && (!busy || row.queued || row.executing || row.rate || row.error || row.state !== "ready"),
  );
  const direction = sorting.down ? -1 : 1;
  const value = (row) => row[sorting.column] ?? (sorting.down ? -Infinity : Infinity);
  shown.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y)) : x - y;
    return direction * order || a.key.localeCompare(b.key);
  });
  const body = $("models");
  shown.forEach((row, at) => {
    row.element ??= line(row);
    fill(row);
    // Rows in their place are not moved: pointer and focus stay.
    if (body.children[at] !== row.element) body.insertBefore(row.element, body.children[at] ?? null);
  });
  while (body.children.length > shown.length) body.lastChild.remove();
  say($("shown"), `${shown.length} of ${rows.size}`);
}

function line(row) {
  const cells = COLUMNS.map((column) => make("td", { className: column.number ? "number" : column.id, hidden: column.hidden?.() ?? false }));
  const button = make("button", { type: "button", textContent: row.name, title: row.name });
  button.addEventListener("click", () => tell(row));
  const dot = make("i");
  dot.style.background = colour(row.name);
  cells[0].append(dot, button);
  const element = make("tr", {}, ...cells);
  element.dataset.model = row.name;
  return element;
}

function fill(row) {
  row.element.dataset.trouble = String(Boolean(row.error));
  row.element.title = row.error ?? "";
  COLUMNS.forEach((column, at) => {
    if (at === 0) return;
    const cell = row.element.children[at];
    cell.hidden = column.hidden?.() ?? false;
    say(cell, column.show ? column.show(row) : String(row[column.id] ?? ""));
  });
}

function drawTotals() {
  const sum = (name) => [...rows.values()].reduce((total, row) => total + (row[name] ?? 0), 0);
  const cold = [...servers.values()].reduce((sum, { state }) => sum + (state?.cold ?? 0), 0);
  const resident = [...rows.values()].filter((row) => row.weights === "resident").length;
  say($("total-models"), cold ? `${rows.size + cold}: ${resident} resident, ${cold} cold` : String(rows.size));
  say($("total-rate"), rate(sum("rate")));
  say($("total-queued"), String(sum("queued")));
  say($("total-loads"), rate(sum("loading")));
}

const SEVERITIES = ["critical", "warning", "note"];

/** The severest finding of all servers is the page's first line; opened, it has all, with causes and cures. */
function drawFindings() {
  const all = [...servers].flatMap(([server, { state }]) => (state?.findings ?? []).map((one) => ({ ...one, server })));
  all.sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity));
  const urgent = all.filter((one) => one.severity !== "note"), notes = all.length - urgent.length;
  const where = (one) => (servers.size > 1 ? `${one.server}: ` : "");
  $("diagnosis").dataset.severity = urgent[0]?.severity ?? "none";
  say($("headline"), urgent.length
    ? `${urgent[0].severity}: ${where(urgent[0])}${urgent[0].evidence}` + (urgent.length > 1 ? ` (and ${urgent.length - 1} more)` : "")
    : "no findings" + (notes ? ` but ${notes} note${notes > 1 ? "s" : ""}` : ""));
  // Open details keep the pointer's selection while nothing changes.
  const content = JSON.stringify(all);
  if (drawFindings.content === content) return;
  drawFindings.content = content;
  $("findings").replaceChildren(...all.map((one) =>
    make("li", {}, `${one.severity}: ${where(one)}${one.evidence}`, make("span", { textContent: `why: ${one.cause}` }), make("span", { textContent: `do: ${one.cure}` }))));
}

// --- history, steering, log ------------------------------------------------------------------------------------

async function tell(row) {
  shown = row.key;
  $("history").hidden = false;
  say($("history-title"), `History of ${row.name}`);
  $("actions").replaceChildren(...(writable ? ["pin", "unpin", "prefetch", "evict"].map((what) => action(what, row)) : []));
  const query = new URLSearchParams({ server: row.server, model: row.name });
  let lines;
  try {
    const answer = await fetch(`live/history?${query}`);
    lines = answer.ok ? await answer.json() : [await answer.text()];
  } catch (error) {
    lines = [String(error)];
  }
  if (shown === row.key) $("history-lines").replaceChildren(...lines.reverse().map((text) => make("li", { textContent: text })));
}

function action(what, row) {
  const button = make("button", { type: "button", textContent: what });
  button.addEventListener("click", async () => {
    let token = sessionStorage.getItem("token") ?? prompt("token") ?? "";
    const answer = await fetch("live/steer", {
      method: "POST",
      headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
      body: JSON.stringify({ server: row.server, model: row.name, what }),
    });
    if (answer.status === 401) sessionStorage.removeItem("token");
    else sessionStorage.setItem("token", token);
    log({ t: Date.now() / 1000, server: row.server, text: answer.ok ? `${what} ${row.name}: done` : `${what} ${row.name}: ${await answer.text()}` });
  });
  return button;
}

function log({ t, server, text }) {
  const time = make("time", { textContent: new Date(t * 1000).toLocaleTimeString() });
  const item = make("li", {}, time, servers.size > 1 ? `${server}: ${text}` : text);
  item.dataset.server = server;
  $("log").prepend(item);
  while ($("log").children.length > MOST_LINES) $("log").lastChild.remove();
}

// --- the stream -----------------------------------------------------------------------------------------------

const on = (source, name, take) => source.addEventListener(name, (event) => take(JSON.parse(event.data)));
const connection = (state, text) => {
  $("connection").dataset.state = state;
  say($("connection"), text);
};

const source = new EventSource("live/stream");
source.addEventListener("open", () => connection("live", "live"));
source.addEventListener("error", () => connection("lost", "connection lost; retrying"));
on(source, "hello", (hello) => {
  writable = hello.writable;
});
on(source, "begin", ({ server }) => {
  // Its latest lines and spans follow.
  for (const device of known(server).devices.values()) device.spans.length = 0;
  for (const item of [...$("log").children]) if (item.dataset.server === server) item.remove();
});
on(source, "log", ({ server, is }) => log({ server, ...is }));
on(source, "spans", ({ server, is }) => takeSpans(server, is.spans));
on(source, "state", ({ server, is }) => {
  const hidden = () => COLUMNS.map((column) => column.hidden?.()).join();
  const before = hidden(), state = { ...is, server };
  take(state);
  servers.get(state.server).seen = performance.now();
  if (before !== hidden()) drawHeader();
  drawDevices();
  drawModels();
  drawTotals();
  drawFindings();
});
on(source, "gone", ({ server }) => {
  for (const device of servers.get(server)?.devices.values() ?? []) device.card?.root.remove();
  servers.delete(server);
  for (const [key, row] of rows) if (row.server === server) { row.element?.remove(); rows.delete(key); }
  drawHeader();
  drawModels();
  drawTotals();
  drawFindings();
});
for (const id of ["find", "busy"]) $(id).addEventListener("input", drawModels);
const frame = () => {
  for (const server of servers.values()) {
    const silent = (performance.now() - server.seen) / 1000;
    for (const device of server.devices.values()) {
      if (!device.card) continue;
      drawTimeline(server, device);
      if (silent > SILENCE) {
        device.card.root.dataset.up = "false";
        say(device.card.facts, `no figures for ${Math.round(silent)} s`);
      }
    }
  }
  setTimeout(() => requestAnimationFrame(frame), 100);
};
drawHeader();
frame();
