// The data of all servers from the stream: states, models, memory, spans and charts.

export const SECONDS = 30; // of the timeline
const MOST_SPANS = 50_000; // of a device
const IDLE = { rate: 0, speed: 0, share: 0, loading: 0 };

/** The servers by name. `devices` has {card, spans, busy} by number. */
export const servers = new Map();
/** The models by `server/model`: figures, and the row of the table. */
export const rows = new Map();

export const known = (name) => {
  if (!servers.has(name)) {
    servers.set(name, { name, devices: new Map(), state: null, seen: 0, facts: null, memory: {}, charts: {}, cold: [], aliases: [], waiting: [] });
  }
  return servers.get(name);
};
export const deviceOf = (server, number) => {
  if (!server.devices.has(number)) server.devices.set(number, { number, card: null, spans: [], busy: null, view: null });
  return server.devices.get(number);
};
export const ofServer = (name) => [...rows.values()].filter((row) => row.server === name);

/** Apply a state. If it has `gone`, it has only the models that changed; all others were idle. Convert counters to rates. */
export function take(name, state) {
  const server = known(name), before = server.state;
  server.state = state;
  server.seen = performance.now();
  if (state.models) takeModels(server, before, state);
  takeAliases(server, before, state);
  if (!state.up) return ofServer(name).forEach((row) => Object.assign(row, IDLE)); // keep the other figures
  const elapsed = elapsedSince(before, state);
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
  // Store the numbers of waiting requests with their times, for the hover text of the timeline.
  const waiting = ofServer(name).filter((row) => row.queued).sort((a, b) => b.queued - a.queued);
  server.waiting.push({ t: state.t, models: waiting.slice(0, 4).map((row) => `${row.name} (${row.queued})`), more: waiting.length - 4 });
  if (server.waiting.length > 2 * SECONDS) server.waiting.shift();
}

const elapsedSince = (before, state) => (before?.up && before.instance === state.instance ? state.t - before.t : 0);

function takeModels(server, before, state) {
  const elapsed = elapsedSince(before, state), listed = new Set();
  for (const model of state.models) {
    const key = `${server.name}/${model.name}`;
    const row = rows.get(key) ?? { key, server: server.name };
    const per = (name) => (elapsed > 0 && row[name] != null ? Math.max(0, (model[name] - row[name]) / elapsed) : null);
    const rates = { rate: per("requests"), speed: per("tokens"), share: per("device_s"), loading: per("loads") };
    rows.set(key, Object.assign(row, model, rates, { places: (model.on ?? []).join(" ") }));
    listed.add(key);
  }
  for (const row of ofServer(server.name)) {
    if (listed.has(row.key)) continue;
    if (!state.gone || state.gone.includes(row.name)) forget(row);
    else Object.assign(row, IDLE);
  }
}

/** Apply the models behind aliases, each of which has a row. A state without aliases has the same ones as the state before. */
function takeAliases(server, before, state) {
  state.aliases ??= before?.aliases ?? [];
  const elapsed = elapsedSince(before, state), last = new Map(server.aliases.map((row) => [row.key, row]));
  server.aliases = state.aliases.flatMap((alias) => alias.targets.map((target) => {
    const key = `${alias.name} ${target.model}`, old = last.get(key), requests = target.answered + target.errors;
    const rate = elapsed > 0 && old ? Math.max(0, (requests - old.requests) / elapsed) : null;
    return { key, alias: alias.name, failure: alias.failure, server: server.name, ...target, requests, rate };
  }));
}

/** Apply the names of the cold models. A model that has a row keeps it. */
export function takeCold(server, names) {
  const before = new Map(server.cold.map((row) => [row.name, row]));
  server.cold = names.map((name) => before.get(name) ?? { key: `${server.name}/${name}`, server: server.name, name, state: "cold" });
}

function forget(row) {
  row.element?.remove();
  rows.delete(row.key);
}

export function dropServer(name) {
  for (const device of servers.get(name)?.devices.values() ?? []) device.card?.root.remove();
  servers.delete(name);
  ofServer(name).forEach(forget);
}

export function takeSpans(name, spans) {
  const server = known(name);
  for (const [kind, model, start, length, n, size, requests, failed, number] of spans) {
    deviceOf(server, number).spans.push({ kind, model, start, length, n, size, requests, failed });
  }
  for (const { spans: stored, view } of server.devices.values()) {
    if (!stored.length) continue;
    const oldest = Math.min(stored.at(-1).start - SECONDS - 5, view?.end ? view.end - view.length : Infinity);
    let gone = Math.max(0, stored.length - MOST_SPANS);
    while (gone < stored.length && stored[gone].start + stored[gone].length < oldest) gone++;
    stored.splice(0, gone);
  }
}

/** Return an address of a server at which this browser can reach it. */
export const outside = (address) => address.replace(/^(0\.0\.0\.0|::|\[::\])(?=:\d+$)/, location.hostname);

/** Return the present time by the server's clock, which may differ from this one: the newest time in its stream. */
export const now = (server) => (server.state?.t ?? 0) + (performance.now() - server.seen) / 1000;
