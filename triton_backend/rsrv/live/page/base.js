// Elements, figures with their units, and the colours of models. All text from outside is set as textContent.

export const $ = (id) => document.getElementById(id);
export const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
export const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

/** Send an order with the token, for which the user is asked once. Return {ok, text}: whether it worked, and the answer. */
export async function order(path, body) {
  const token = sessionStorage.getItem("token") ?? prompt("token") ?? "";
  try {
    const answer = await fetch(path, { method: "POST", headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" }, body });
    if (answer.status === 401) sessionStorage.removeItem("token");
    else sessionStorage.setItem("token", token);
    return { ok: answer.ok, text: await answer.text() };
  } catch (error) {
    return { ok: false, text: String(error) }; // there is no connection, or the token cannot be in a header
  }
}

// --- figures with three digits, as in rsrv/text.py ------------------------------------------------------------

const digits = (value) => String(Number(value.toPrecision(3)));
const amount = (count, unit) => {
  let prefix = 0;
  for (; count >= 999.5 && prefix < 5; prefix++) count /= 1000;
  return `${digits(count)} ${["", "k", "M", "G", "T", "P"][prefix]}${unit}`.trim();
};
export const bytes = (count) => (count == null ? "–" : amount(count, "B"));
export const seconds = (value) => {
  if (value == null) return "–";
  if (value >= 59.95 * 60) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 59.95) return `${(value / 60).toFixed(1)} min`;
  if (value >= 0.9995) return `${digits(value)} s`;
  return value >= 0.9995e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
};
export const rate = (value) => (value == null ? "–" : amount(value, ""));
export const percent = (value) => (value == null ? "–" : `${digits(value * 100)}%`);
export const minute = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit" });
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hourCycle: "h23" });

// --- colours ----------------------------------------------------------------------------------------------------

/** Okabe and Ito's palette, which colour-blind people can distinguish. With three patterns, it is enough for 21 models. */
export const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442"];
const PATTERNS = 3;
export const MOST_COLOURS = COLOURS.length * PATTERNS;
const OTHERS = "#8a8f94";
/** The number of the colour and pattern of each model. */
const claimed = new Map();

/** Assign colours to these models, in their order. A model keeps its colour until another model needs it. */
export function claim(names) {
  const coloured = new Set([...names].slice(0, MOST_COLOURS));
  for (const name of coloured) {
    if (claimed.has(name)) continue;
    const used = new Set(claimed.values());
    let free = 0;
    while (used.has(free)) free++;
    if (free >= MOST_COLOURS) {
      const loser = [...claimed.keys()].find((name) => !coloured.has(name));
      free = claimed.get(loser);
      claimed.delete(loser);
    }
    claimed.set(name, free);
  }
}
export const colour = (name) => (claimed.has(name) ? COLOURS[claimed.get(name) % COLOURS.length] : OTHERS);
const fills = new Map();
/** Return the fill style of a model's shapes on a canvas. It has the same colour and pattern as in `paint`. */
export function fill(context, name) {
  const number = claimed.get(name) ?? 0;
  if (number < COLOURS.length) return colour(name);
  if (!fills.has(number)) {
    const tile = new OffscreenCanvas(6, 6), pen = tile.getContext("2d");
    pen.fillStyle = colour(name);
    pen.fillRect(0, 0, 6, 6);
    pen.fillStyle = "#0008";
    if (number < 2 * COLOURS.length) for (let at = 0; at < 6; at++) pen.fillRect(at, 5 - at, 2, 1);
    else pen.fillRect(2, 2, 2, 2);
    fills.set(number, context.createPattern(tile, "repeat"));
  }
  return fills.get(number);
}
/** Mark an element with the colour and pattern of a model, which the style sheet draws. */
export function paint(element, name) {
  const number = claimed.get(name);
  element.dataset.colour = number == null ? "none" : number % COLOURS.length;
  element.dataset.pattern = number == null ? 0 : Math.floor(number / COLOURS.length);
}
