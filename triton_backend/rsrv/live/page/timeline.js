// A device's timeline. Each model has a lane, and time runs from left to right. Pointer and keys zoom; the pointer shows spans.
import { clock, fill, make, say, seconds } from "./base.js";
import { now, SECONDS } from "./servers.js";

const MOST_LANES = 8, LANE = 15, AXIS = 16, SHORTEST = 0.005;
const REST = ""; // lane of all other models

/** Return the models with the most device time in the timeline. Models that have a lane count twice, so lanes seldom change. */
export function busiest(device) {
  const time = new Map();
  for (const { model, length } of device.spans) time.set(model, (time.get(model) ?? 0) + length);
  for (const model of device.lanes ?? []) if (time.has(model)) time.set(model, 2 * time.get(model));
  return [...time].sort((a, b) => b[1] - a[1]).slice(0, MOST_LANES).map(([model]) => model).sort();
}

export function timeline(server, device) {
  // `end`: Unix time; null: now.
  const view = (device.view = { length: SECONDS, end: null, pointer: null });
  const canvas = make("canvas", { tabIndex: 0 }), hovered = make("output", { ariaLive: "off" }), live = button("live", "follow the present (Esc)", () => show(SECONDS, null));
  canvas.setAttribute("role", "img");
  const end = () => view.end ?? now(server);
  const gutter = () => (canvas.clientWidth < 500 ? 70 : 120);
  const timeAt = (x) => end() - view.length * (1 - (x - gutter()) / (canvas.clientWidth - gutter()));
  const show = (length, until) => {
    view.length = Math.min(SECONDS, Math.max(SHORTEST, length));
    view.end = until == null || until > now(server) ? null : until;
    if (view.end == null && view.length < SECONDS) view.end = now(server);
    live.ariaPressed = String(view.end == null);
  };
  const zoom = (factor, at = end() - view.length / 2) => show(view.length * factor, at + (end() - at) * Math.max(factor, SHORTEST / view.length));
  const pan = (share) => show(view.length, end() + share * view.length);
  canvas.addEventListener("wheel", (event) => {
    // Zoom only with the focus or with Ctrl. Otherwise, the wheel scrolls the page.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), Escape: () => show(SECONDS, null) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("pointermove", (event) => { view.pointer = [event.offsetX, event.offsetY]; });
  canvas.addEventListener("pointerleave", () => { view.pointer = null; });
  const trace = make("a", { textContent: "Perfetto trace", href: `live/trace?${new URLSearchParams({ server: server.name })}`, download: "rsrv-timeline.json" });
  trace.title = "the latest spans, for ui.perfetto.dev";
  const buttons = [button("−", "zoom out (−)", () => zoom(2)), button("+", "zoom in (+)", () => zoom(0.5)), button("‹", "earlier (←)", () => pan(-0.5)), button("›", "later (→)", () => pan(0.5)), live];
  live.ariaPressed = "true";
  const root = make("div", { className: "timeline" }, canvas, make("p", { className: "tools" }, ...buttons, trace, hovered));
  return {
    root,
    label: (name) => { canvas.ariaLabel = `executions, loads and evictions of ${name} by model; + and − zoom, arrows move`; },
    draw: () => {
      const hit = draw(canvas, device, end(), gutter());
      say(hovered, hit ? describe(server, hit) : "");
    },
  };
}

function button(text, title, act) {
  const made = make("button", { type: "button", textContent: text, title, ariaLabel: title });
  made.addEventListener("click", act);
  return made;
}

function describe(server, span) {
  const { kind, model, start, length, n, size, requests, failed } = span;
  const what = { execute: "executed", load: "loaded", evict: "evicted", warm_up: "warmed up" }[kind] ?? kind;
  const padding = size > n ? `, ${size - n} of padding` : "";
  const rows = kind === "execute" ? `: ${n} ${n === 1 ? "row" : "rows"} of ${requests} ${requests === 1 ? "request" : "requests"}${padding}` : "";
  const behind = server.waiting.find((one) => one.t >= start);
  const waited = behind?.models.length ? ` · waiting then: ${behind.models.join(", ")}${behind.more > 0 ? ` and ${behind.more} more` : ""}` : "";
  return `${clock(start)}.${String(Math.floor((start % 1) * 1000)).padStart(3, "0")} ${model} ${what}${kind === "evict" ? "" : ` in ${seconds(length)}`}${rows}${failed ? ", failed" : ""}${waited}`;
}

/** Shorten a name to this many letters. Keep both ends, because names often differ in a prefix or a version. */
const brief = (name, most) => (name.length > most ? `${name.slice(0, most / 2)}…${name.slice(1 - most / 2)}` : name);

/** Draw the lanes, and return the span under the pointer. */
function draw(canvas, device, end, gutter) {
  const lanes = [...(device.lanes ?? []), REST], ratio = devicePixelRatio, { view } = device;
  const rows = new Map(lanes.map((model, at) => [model, at])), tall = lanes.length * LANE + AXIS;
  const width = canvas.clientWidth;
  if (!width) return null;
  if (canvas.style.height !== `${tall}px`) canvas.style.height = `${tall}px`;
  if (canvas.width !== width * ratio || canvas.height !== tall * ratio) Object.assign(canvas, { width: width * ratio, height: tall * ratio });
  const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
  const ink = style.color, bad = style.getPropertyValue("--bad"), line = style.getPropertyValue("--line");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  const scale = (width - gutter) / view.length, from = end - view.length;
  drawAxis(context, { width, gutter, scale, from, end, tall, ink, line });
  context.font = "11px system-ui, sans-serif";
  lanes.forEach((model, at) => {
    context.fillStyle = line;
    context.fillRect(gutter, (at + 1) * LANE - 1, width - gutter, 1);
    context.fillStyle = ink;
    context.fillText(model === REST ? "other models" : brief(model, Math.floor(gutter / 6)), 0, at * LANE + 11, gutter - 14);
    context.fillStyle = fill(context, model);
    context.fillRect(gutter - 10, at * LANE + 3, 8, 8);
  });
  let hit = null;
  const painted = new Map(); // for each lane and kind, the column up to which it is painted
  for (const span of device.spans) {
    const left = gutter + (span.start - from) * scale, right = Math.max(left + span.length * scale, left + 1 / ratio);
    if (left > width || right < gutter) continue;
    const row = rows.get(span.model) ?? rows.get(REST), top = row * LANE + 1, low = span.kind === "load";
    const [x, y] = view.pointer ?? [-9, -9];
    if (y >= top && y < top + LANE && x >= left - 2 && x <= right + 2) hit = span;
    // Skip spans that would be in a painted column: with thousands a second, these are most of them.
    const where = `${row}${span.kind}`;
    if (right <= (painted.get(where) ?? -1) && !span.failed) continue;
    painted.set(where, Math.ceil(right * ratio) / ratio);
    const start = Math.max(left, gutter), breadth = right - start;
    context.fillStyle = span.kind === "evict" ? ink : fill(context, row === lanes.length - 1 ? REST : span.model);
    if (span.kind === "evict") context.fillRect(start, top + 8, 1, 5);
    else if (low) context.fillRect(start, top + 9, breadth, 4);
    else {
      const share = span.size > 0 ? span.n / span.size : 1;
      context.globalAlpha = 0.3;
      context.fillRect(start, top, breadth, 13);
      context.globalAlpha = 1;
      context.fillRect(start, top + 13 * (1 - share), breadth, 13 * share);
    }
    if (span.failed) {
      context.fillStyle = bad;
      context.fillRect(start, top, Math.max(2, breadth), 3);
    }
  }
  return hit;
}

function drawAxis(context, { width, gutter, scale, from, end, tall, ink, line }) {
  const least = 90 / scale; // seconds between two times
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((one) => one >= least) ?? 10;
  context.font = "11px system-ui, sans-serif";
  for (let t = Math.ceil(from / step) * step; t <= end; t += step) {
    const x = gutter + (t - from) * scale;
    context.fillStyle = line;
    context.fillRect(x, 0, 1, tall - AXIS + 3);
    context.fillStyle = ink;
    const part = step < 1 ? (t % 1).toFixed(step < 0.1 ? 3 : 1).slice(1) : "";
    if (x < width - 50) context.fillText(clock(Math.floor(t)) + part, x + 2, tall - 3);
  }
}
