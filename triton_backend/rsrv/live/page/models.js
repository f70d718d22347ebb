// The table of models, which can be searched, filtered and sorted, and shows a page at a time.
import { $, bytes, make, paint, percent, rate, say, seconds } from "./base.js";
import { rows, servers } from "./servers.js";

const PAGE = 100; // rows
const sorting = { column: "share", down: true };
let first = 0, open = () => {};

const generates = () => [...rows.values()].some((row) => row.tokens);
const several = () => [...servers.values()].some((server) => server.devices.size > 1);
const COLUMNS = [
  { id: "name", title: "model" },
  { id: "server", title: "server", hidden: () => servers.size < 2 },
  { id: "weights", detail: true, title: "state", show: (row) => (row.state === "ready" && row.paused ? `paused (${row.paused})` : row.state === "ready" && row.residency === "device" ? `pinned, ${row.weights}` : row.weights) },
  { id: "places", detail: true, title: "on", hidden: () => !several() },
  { id: "bytes", detail: true, title: "size", number: true, show: (row) => (row.bytes == null ? "" : bytes(row.bytes)) },
  { id: "queued", detail: true, title: "waiting", number: true },
  { id: "executing", detail: true, title: "running", number: true },
  { id: "rate", title: "requests/s", number: true, show: (row) => rate(row.rate) },
  { id: "speed", detail: true, title: "tokens/s", number: true, hidden: () => !generates(), show: (row) => (row.tokens ? rate(row.speed) : "") },
  { id: "share", detail: true, title: "device", number: true, show: (row) => percent(row.share) },
  { id: "p99_s", title: "p99", number: true, show: (row) => seconds(row.p99_s) },
  { id: "load_s", detail: true, title: "load", number: true, show: (row) => (row.loads ? seconds(row.load_s) : "") },
  { id: "loads", detail: true, title: "loads", number: true, show: (row) => (row.kind === "meta" ? "" : String(row.loads ?? "")) },
  { id: "errors", title: "errors", number: true },
];
/** Narrow screens leave out the details, which are in the panel of a model, and show the state below the name. */
const style = (column) => [column.number ? "number" : column.id, column.detail ? "detail" : ""].join(" ").trim();
const FILTERS = {
  all: () => true,
  busy: (row) => row.queued || row.executing || row.rate,
  trouble: (row) => row.error || (row.state !== "ready" && row.state !== "loading"),
  resident: (row) => row.weights?.startsWith("resident"),
  warm: (row) => row.weights?.startsWith("warm"),
};
const cold = () => [...servers.values()].flatMap((server) => server.cold.map((row) => Object.assign(row, { weights: server.state?.asleep ? "asleep" : "cold" })));

function drawHeader() {
  const cells = COLUMNS.map((column) => {
    const button = make("button", { type: "button", textContent: column.title });
    button.addEventListener("click", () => {
      sorting.down = sorting.column === column.id ? !sorting.down : column.number === true;
      sorting.column = column.id;
      drawHeader();
      drawModels();
      [...$("columns").querySelectorAll("button")].find((one) => one.textContent === column.title).focus();
    });
    const cell = make("th", { className: style(column), hidden: column.hidden?.() ?? false, scope: "col" }, button);
    if (sorting.column === column.id) cell.ariaSort = sorting.down ? "descending" : "ascending";
    return cell;
  });
  $("columns").replaceChildren(...cells);
}

let hiddenBefore = null;
export function drawModels() {
  const hidden = COLUMNS.map((column) => column.hidden?.() ?? false).join();
  if (hidden !== hiddenBefore) drawHeader();
  hiddenBefore = hidden;
  const searched = $("find").value.trim().toLowerCase(), filter = $("filter").value;
  const of = filter === "cold" ? cold() : [...rows.values()].filter(FILTERS[filter]);
  const matching = of.filter((row) => row.name.toLowerCase().includes(searched));
  const direction = sorting.down ? -1 : 1;
  const value = (row) => row[sorting.column] ?? (sorting.down ? -Infinity : Infinity);
  matching.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y)) : x < y ? -1 : x > y ? 1 : 0;
    return direction * order || a.key.localeCompare(b.key);
  });
  first = Math.max(0, Math.min(first, Math.floor((matching.length - 1) / PAGE) * PAGE));
  const shown = matching.slice(first, first + PAGE), body = $("models");
  shown.forEach((row, at) => {
    row.element ??= line(row);
    fill(row);
    // Do not move rows that are in their place, so that they keep the pointer and the focus.
    if (body.children[at] !== row.element) body.insertBefore(row.element, body.children[at] ?? null);
  });
  while (body.children.length > shown.length) body.lastChild.remove();
  const range = matching.length > PAGE ? `${first + 1} to ${first + shown.length} of ` : "";
  say($("shown"), !of.length ? "none" : `${range}${matching.length === of.length ? "" : `${matching.length} of `}${of.length}`);
  $("pages").hidden = matching.length <= PAGE;
  $("previous").disabled = first === 0;
  $("next").disabled = first + PAGE >= matching.length;
}

function line(row) {
  const button = make("button", { type: "button", textContent: row.name, title: row.name });
  button.addEventListener("click", () => open(row));
  const cells = COLUMNS.map((column) => make("td", { className: style(column) }));
  cells[0].append(make("i"), button);
  const element = make("tr", {}, ...cells);
  element.dataset.model = row.name;
  return element;
}

function fill(row) {
  row.element.dataset.trouble = String(Boolean(row.error));
  if (row.element.title !== (row.error ?? "")) row.element.title = row.error ?? "";
  paint(row.element.querySelector("i"), row.name);
  COLUMNS.forEach((column, at) => {
    const cell = row.element.children[at], hidden = column.hidden?.() ?? false;
    if (cell.hidden !== hidden) cell.hidden = hidden;
    if (column.number && row.state === "cold") say(cell, "");
    else if (at > 0) say(cell, column.show ? column.show(row) : String(row[column.id] ?? ""));
    if (column.id === "weights") row.element.firstChild.dataset.state = cell.textContent;
  });
}

/** Begin to show the table. `opens` is called with a row when its name is clicked. */
export function beginModels(opens) {
  open = opens;
  for (const id of ["find", "filter"]) $(id).addEventListener("input", () => { first = 0; drawModels(); });
  const turn = (by) => () => { first += by; drawModels(); };
  $("previous").addEventListener("click", turn(-PAGE));
  $("next").addEventListener("click", turn(PAGE));
  drawHeader();
}
