// A request for a model: the command for curl, and a form for clients with the token.
import { $, make, order, say, seconds } from "./base.js";
import { outside, servers } from "./servers.js";

const MOST_VALUES = 1024; // of an input of the form

/** Return the shape of one row, with 1 for each extent that may vary. */
const sizesOf = ({ shape }) => shape.map((size) => Math.max(1, Number(size)));
const countOf = (input) => sizesOf(input).reduce((product, size) => product * size, 1);
const ZERO = { BYTES: '"text"', BOOL: "false" };

/** Return the elements about a request for a model. `details` has the panel's data. Streams and sequences have no form. */
export function request(row, details, writable) {
  const inputs = (details.inputs ?? []).filter((input) => !input.optional);
  if (!inputs.length) return [];
  return [...command(row, inputs, details), ...(writable && !details.streams && !details.sequence ? form(row, inputs) : [])];
}

/** Return the command for a request whose values are zeros. */
function command(row, inputs, { streams, sequence }) {
  const http = servers.get(row.server)?.facts?.endpoints.HTTP;
  if (!http) return [];
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parameters = sequence ? '"parameters":{"sequence_id":1,"sequence_start":true,"sequence_end":true},' : "";
  let word = "", text = streams ? "{" : `{${parameters}"inputs":[`; // word of the shell, and JSON that is not quoted yet
  inputs.forEach((input, at) => {
    const { datatype } = input, name = JSON.stringify(input.name), count = countOf(input), zero = ZERO[datatype] ?? "0";
    text += at ? "," : "";
    text += streams ? `${name}:[` : `{"name":${name},"datatype":${JSON.stringify(datatype)},"shape":${JSON.stringify(sizesOf(input))},"data":[`;
    if (count <= 32) text += Array(count).fill(zero).join();
    else {
      word += `${quoted(text)}"$(yes ${quoted(zero)} | head -n ${count} | paste -sd, -)"`;
      text = "";
    }
    text += streams ? "]" : "]}";
  });
  const url = `http://${outside(http)}/v2/models/${encodeURIComponent(row.name)}/${streams ? "generate_stream" : "infer"}`;
  const line = `printf %s ${word}${quoted(text + (streams ? "}" : "]}"))} | curl -s${streams ? "N" : ""} ${quoted(url)} -d @-`;
  const copy = make("button", { type: "button", textContent: "copy" }), shown = make("pre", { id: "curl", tabIndex: 0, textContent: line });
  copy.addEventListener("click", () => {
    // Over plain HTTP, as here, browsers have no navigator.clipboard.
    getSelection().selectAllChildren(shown);
    document.execCommand("copy");
  });
  return [make("h3", {}, "One request ", copy), shown];
}

/** Return a form for a small request. The server's control process passes the request to Triton. */
function form(row, inputs) {
  if (inputs.some((input) => countOf(input) > MOST_VALUES)) return [];
  const fields = inputs.map((input) => {
    const { name, datatype } = input, text = datatype === "BYTES", zeros = Array(countOf(input)).fill(text ? "text" : ZERO[datatype] ?? "0");
    const shape = make("input", { value: sizesOf(input).join(", "), ariaLabel: `shape of ${name}`, autocomplete: "off" });
    const data = make("textarea", { value: zeros.join(text ? "\n" : ", "), rows: 2, spellcheck: false, ariaLabel: `values of ${name}` });
    const read = () => {
      // Send digits as they are, because JavaScript's numbers have only 53 bits.
      const whole = shape.value.trim() === "1" || zeros.length === 1;
      const values = text ? JSON.stringify(whole ? [data.value] : data.value.split("\n")) : `[${data.value}]`;
      const json = `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${shape.value}],"data":${values}}`;
      try {
        JSON.parse(json);
      } catch {
        throw new Error(`${name}: write shape and values as numbers with commas between`);
      }
      return json;
    };
    const title = `${name}: ${datatype}${text && zeros.length > 1 ? ", a text per line" : ""}, shape`;
    return { read, element: make("p", { className: "field" }, make("label", {}, title), shape, data) };
  });
  const send = make("button", { textContent: "send" }), answer = make("pre", { id: "answer", tabIndex: 0, hidden: true });
  answer.setAttribute("role", "status");
  const element = make("form", { id: "try" }, ...fields.map((field) => field.element), send, answer);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    answer.hidden = false;
    try {
      const values = fields.map((field) => field.read()).join(), begun = performance.now();
      say(answer, "…");
      send.disabled = true;
      const reply = await order("live/try", `{"server":${JSON.stringify(row.server)},"model":${JSON.stringify(row.name)},"inputs":[${values}]}`);
      say(answer, describe(reply, (performance.now() - begun) / 1000));
    } catch (error) {
      say(answer, error.message);
    }
    send.disabled = false;
  });
  return [make("h3", { textContent: "Try it" }), element];
}

/** Return the outputs of an answer as text, or the server's error. */
function describe({ ok, text }, elapsed) {
  try {
    const { outputs, error } = JSON.parse(text);
    if (!ok) return error ?? text;
    const lines = outputs.map(({ name, datatype, shape, data }) => `${name}: ${datatype} [${shape.join(", ")}]\n${data.map((one) => JSON.stringify(one)).join(", ")}`);
    return [`answered after ${seconds(elapsed)}`, ...lines].join("\n");
  } catch {
    return text;
  }
}
