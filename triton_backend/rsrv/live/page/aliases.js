// The table of aliases. Each model behind an alias has a row.
import { $, make, rate, say } from "./base.js";
import { servers } from "./servers.js";

const COLUMNS = [
  { id: "alias", title: "alias" },
  { id: "server", title: "server", hidden: () => servers.size < 2 },
  { id: "model", title: "model" },
  { id: "share", title: "share", show: (row) => (row.copies ? `${row.share}: ${row.copies}` : row.share) },
  { id: "rate", title: "requests/s", number: true, show: (row) => rate(row.rate) },
  { id: "answered", title: "answered", number: true, detail: true },
  { id: "errors", title: "errors", number: true },
];

export function drawAliases() {
  const rows = [...servers.values()].flatMap((server) => server.aliases), body = $("aliases");
  $("aliases-section").hidden = !rows.length;
  const columns = COLUMNS.filter((column) => !column.hidden?.());
  const style = (column) => [column.number ? "number" : column.id, column.detail ? "detail" : ""].join(" ").trim();
  if ($("alias-columns").childElementCount !== columns.length) {
    $("alias-columns").replaceChildren(...columns.map((column) => make("th", { className: style(column), scope: "col", textContent: column.title })));
    body.replaceChildren();
  }
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) body.append(make("tr", {}, ...columns.map((column) => make("td", { className: style(column) }))));
  rows.forEach((row, at) => {
    const line = body.children[at], again = at > 0 && rows[at - 1].alias === row.alias && rows[at - 1].server === row.server;
    line.dataset.trouble = String(Boolean(row.failure));
    line.title = row.failure;
    columns.forEach((column, number) => say(line.children[number], column.id === "alias" && again ? "" : column.show ? column.show(row) : String(row[column.id])));
  });
}
