// The devices: the memory of each model, shared tensors as separate blocks, and the timeline below.
import { $, bytes, claim, clock, make, MOST_COLOURS, paint, percent, say } from "./base.js";
import { deviceOf, ofServer, servers } from "./servers.js";
import { busiest, timeline } from "./timeline.js";

const MOST_SHARED = 12; // blocks of shared tensors; one more block has the rest

export function drawDevices() {
  const cards = [], models = new Map();
  for (const name of [...servers.keys()].sort()) {
    const server = servers.get(name);
    if (!server.state) continue;
    if (!server.devices.size) deviceOf(server, 0); // the server was never up
    for (const device of server.devices.values()) {
      device.lanes = busiest(device);
      for (const model of device.lanes) models.set(model, Infinity);
    }
    for (const row of ofServer(name)) {
      if (row.on?.length) models.set(row.name, models.get(row.name) ?? row.bytes ?? 0);
    }
  }
  claim([...models].sort((a, b) => b[1] - a[1]).map(([name]) => name));
  for (const name of [...servers.keys()].sort()) {
    const server = servers.get(name);
    for (const device of [...server.devices.values()].sort((a, b) => a.number - b.number)) {
      if (!server.state) continue;
      device.card ??= card(server, device);
      // A device that sleeps, or whose runtime is dead, keeps its name.
      device.name = server.state.devices?.find((one) => one.number === device.number)?.name || device.name;
      drawDevice(server, device, [...(servers.size < 2 ? [] : [name]), `device ${device.number}`, ...(device.name ? [device.name] : [])].join(" · "));
      cards.push(device.card);
    }
  }
  cards.forEach(({ root }, at) => {
    const there = $("devices").children[at];
    if (there !== root) $("devices").insertBefore(root, there ?? null);
  });
}

function drawDevice(server, { number, card, busy }, title) {
  const { state } = server, device = state.devices?.find((one) => one.number === number);
  const up = state.up && device?.held != null, asleep = device?.asleep_since;
  card.root.dataset.up = String(up || asleep != null);
  say(card.title, title);
  card.timeline.label(title);
  if (!up) {
    say(card.facts, !state.up ? state.why : asleep != null ? `asleep since ${clock(asleep)}; the next request wakes it` : `its runtime has not answered since ${clock(device.down_since)}`);
    card.bar.replaceChildren();
    return;
  }
  const saved = device.logical > 1.005 * device.physical ? ` (${bytes(device.logical)} without sharing, ${percent(1 - device.physical / device.logical)} saved)` : "";
  say(card.facts, `${bytes(device.held)}${saved} ${device.budget == null ? "of weights, no limit" : `of ${bytes(device.budget)} for weights`} · `
    + (device.card ? `GPU ${bytes(device.card.used_bytes)} of ${bytes(device.card.total_bytes)} in use · ` : "")
    + `busy ${percent(busy ?? 0)} · host ${bytes(device.host)}`);
  drawBar(card.bar, blocks(server, number, device));
}

/** Return the blocks of a device's bar: models by size, shared tensors, and free memory. */
function blocks(server, number, device) {
  const memory = server.memory[number] ?? { scratch: 0, models: {}, groups: [] };
  const there = new Map(ofServer(server.name).filter((row) => row.on?.includes(number)).map((row) => [row.name, row]));
  const own = [...there.values()].map((row) => ({
    model: row.name, bytes: memory.models[row.name] ?? row.bytes ?? 0, kind: row.residency === "device" ? "model pinned" : "model",
  })).sort((a, b) => b.bytes - a.bytes || a.model.localeCompare(b.model));
  const shared = memory.groups.filter(([, names]) => names.some((name) => there.has(name))).map(([size, names]) => ({
    kind: "shared", bytes: size, label: `shared by ${names.length}`, text: `shared by ${names.slice(0, 8).join(", ")}${names.length > 8 ? ` and ${names.length - 8} more` : ""}`,
  })).sort((a, b) => b.bytes - a.bytes);
  const weights = [...gathered(own, MOST_COLOURS, "model", "other models"), ...gathered(shared, MOST_SHARED, "shared", "other shared tensors")];
  const known = weights.reduce((sum, part) => sum + part.bytes, 0);
  const whole = device.limit ?? device.budget ?? Math.max(known, device.physical, 1), budget = device.budget ?? whole;
  const moving = Math.max(0, Math.max(device.held, device.physical) - known);
  const others = [["moving", moving, "loading or leaving"], ["free", budget - known - moving, "free"], ["scratch", whole - budget, `kept for executions (${bytes(memory.scratch)}) and a reserve`]];
  const label = { free: (size) => `${bytes(size)} free`, scratch: (size) => `${bytes(size)} kept` };
  return [...weights, ...others.map(([kind, size, text]) => ({ kind, bytes: Math.max(0, size), text, label: label[kind]?.(size) }))].filter((part) => part.bytes > 0);
}

function gathered(parts, most, kind, text) {
  if (parts.length <= most) return parts;
  const others = parts.splice(most - 1);
  return [...parts, { kind, bytes: others.reduce((sum, one) => sum + one.bytes, 0), text: `${others.length} ${text}`, label: `${others.length} others` }];
}

function drawBar(bar, parts) {
  const whole = parts.reduce((sum, one) => sum + one.bytes, 0);
  while (bar.children.length > parts.length) bar.lastChild.remove();
  while (bar.children.length < parts.length) bar.append(make("i"));
  parts.forEach((part, at) => {
    const block = bar.children[at];
    block.className = part.kind;
    block.style.flexGrow = part.bytes;
    if (part.model) paint(block, part.model);
    else for (const name of ["colour", "pattern"]) delete block.dataset[name];
    const text = `${part.text ?? part.model}${part.kind.endsWith("pinned") ? ", pinned" : ""}: ${bytes(part.bytes)}`;
    if (block.title !== text) block.title = text;
    // Show no name in a narrow block, because it would be a part of a letter.
    say(block, part.bytes > whole / 30 ? (part.label ?? part.model ?? "") : "");
  });
  bar.ariaLabel = `memory: ${parts.slice(0, 12).map((part) => `${part.text ?? part.model} ${bytes(part.bytes)}`).join(", ")}`;
}

function card(server, device) {
  const title = make("b"), facts = make("span"), bar = make("div", { className: "bar", role: "img" });
  const below = timeline(server, device);
  const root = make("div", { className: "device" }, make("h3", {}, title, facts), bar, below.root);
  Object.assign(root.dataset, { server: server.name, device: device.number });
  return { root, title, facts, bar, timeline: below };
}
