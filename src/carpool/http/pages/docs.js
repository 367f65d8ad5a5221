// Shows /openapi.json for people: each address, what it takes, what it answers, and a request to try.

const METHODS = ["get", "put", "post", "delete", "patch"];
const IS_TEXT = /json|^text\/|urlencoded/;

function element(name, given = {}, ...inner) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) made[key] = value;
  made.append(...inner.filter((each) => each !== null));
  return made;
}

const title = (text) => element("h3", {}, text);
const shown = (value) => element("pre", {}, JSON.stringify(value, null, 2));

// A schema with what its references lead to in their places; one that holds itself stays a reference there.
function whole(schema, known, above = []) {
  if (Array.isArray(schema)) return schema.map((each) => whole(each, known, above));
  if (schema === null || typeof schema !== "object") return schema;
  const name = schema.$ref;
  if (typeof name === "string" && !above.includes(name)) {
    const target = name.replace(/^#\//, "").split("/").reduce((at, key) => at?.[key], known);
    return whole(target, known, [...above, name]);
  }
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, whole(value, known, above)]));
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

class Operation {
  constructor(known, path, method, about, key) {
    Object.assign(this, { known, path, method, about, key });
    this.content = about.requestBody?.content ?? {};
    this.fields = (about.parameters ?? []).map((each) => [each, element("input", { type: "text" })]);
    this.type = element("select", {}, ...Object.keys(this.content).map((each) => element("option", {}, each)));
    this.body = element("textarea", { spellcheck: false });
    this.file = element("input", { type: "file" });
    this.schema = element("div");
    this.answer = element("div");
  }

  get shown() {
    const about = this.about;
    const inner = element("div", {}, about.description ? element("p", {}, about.description) : null);
    if (this.fields.length) inner.append(title("Parameters"), ...this.fields.map(([each, input]) => this.label(each, input)));
    if (about.requestBody) {
      inner.append(title("Body"), this.type, this.body, this.file, this.schema);
      this.type.onchange = () => this.choose();
      this.choose();
    }
    const send = element("button", { type: "button" }, "Send");
    send.onclick = () => this.send();
    inner.append(element("p", {}, send), this.answer, title("Answers"));
    const rows = Object.entries(about.responses ?? {}).map(([status, each]) =>
      element("tr", {}, element("td", {}, element("code", {}, status)), element("td", {}, each.description ?? "")),
    );
    inner.append(element("table", {}, ...rows));
    const result = Object.entries(about.responses ?? {}).find(([status]) => status.startsWith("2"))?.[1].content;
    for (const [type, each] of Object.entries(result ?? {})) if (each.schema) inner.append(this.folded(`The answer as ${type}`, each.schema));
    const name = element("span", { className: `method ${this.method}` }, this.method.toUpperCase());
    const summary = element("summary", {}, name, element("code", {}, this.path), element("span", { className: "soft" }, `  ${about.summary ?? ""}`));
    return element("details", { className: "operation" }, summary, inner);
  }

  label(each, input) {
    const fallback = each.schema?.default;
    if (fallback !== undefined) input.placeholder = String(fallback);
    return element("label", {}, element("code", {}, each.name), input, element("small", {}, each.description ?? ""));
  }

  folded(text, schema) {
    return element("details", {}, element("summary", { className: "soft" }, text), shown(whole(schema, this.known)));
  }

  // Shows the place for a body of the chosen type, with an example if there is one.
  choose() {
    const chosen = this.content[this.type.value] ?? {};
    const isText = IS_TEXT.test(this.type.value);
    this.body.hidden = !isText;
    this.file.hidden = isText;
    const value = Object.values(chosen.examples ?? {})[0]?.value ?? chosen.example;
    this.body.value = value === undefined ? "" : typeof value === "string" && !/json/.test(this.type.value) ? value : JSON.stringify(value, null, 2);
    this.schema.replaceChildren(...(chosen.schema ? [this.folded("What fits", chosen.schema)] : []));
  }

  get request() {
    let path = this.path;
    const headers = {}, query = new URLSearchParams();
    for (const [each, input] of this.fields) {
      if (each.in === "path") path = path.replace(`{${each.name}}`, encodeURIComponent(input.value));
      else if (!input.value) continue;
      else if (each.in === "header") headers[each.name] = input.value;
      else if (each.in === "query") query.append(each.name, input.value);
    }
    if (this.key.value) headers["X-API-Key"] = this.key.value;
    const hasBody = this.about.requestBody !== undefined;
    if (hasBody) headers["Content-Type"] = this.type.value;
    const body = hasBody ? (this.file.hidden ? this.body.value : this.file.files[0]) : undefined;
    const words = String(query);
    return { path: path.replace(/^\//, "") + (words ? `?${words}` : ""), method: this.method.toUpperCase(), headers, body };
  }

  async send() {
    const { path, ...request } = this.request;
    const url = new URL(path || ".", document.baseURI);
    const parts = [`curl -X ${request.method} ${quoted(String(url))}`];
    for (const [name, value] of Object.entries(request.headers)) parts.push(`-H ${quoted(`${name}: ${name === "X-API-Key" ? "…" : value}`)}`);
    if (typeof request.body === "string") parts.push(`--data-binary ${quoted(request.body)}`);
    else if (request.body) parts.push(`--data-binary @${quoted(request.body.name)}`);
    const status = element("p", { className: "status" }, "…");
    const text = element("pre");
    this.answer.replaceChildren(title("As a command"), element("pre", {}, parts.join(" \\\n  ")), title("Answer"), status, text);
    const began = performance.now();
    try {
      const response = await fetch(url, request);
      status.classList.toggle("bad", !response.ok);
      const type = response.headers.get("Content-Type") ?? "";
      const first = performance.now() - began;
      status.textContent = `${response.status} ${response.statusText}, ${type || "no body"}, after ${first.toFixed(1)} ms`;
      if (type && !IS_TEXT.test(type)) {
        text.textContent = `${(await response.arrayBuffer()).byteLength} bytes`;
        return;
      }
      const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader?.read(); part && !part.done; part = await reader.read()) text.append(part.value);
    } catch (error) {
      status.className = "status bad";
      status.textContent = String(error);
    }
  }
}

const page = document.getElementById("docs");
try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`/openapi.json answers ${response.status}`);
  const known = await response.json();
  const key = element("input", { type: "password", autocomplete: "off" });
  page.append(element("h1", {}, known.info.title), element("p", { className: "soft" }, known.info.description ?? ""));
  if (known.components?.securitySchemes) page.append(element("label", {}, "Key", key));
  const groups = new Map();
  for (const [path, methods] of Object.entries(known.paths)) {
    for (const method of METHODS.filter((each) => each in methods)) {
      const tag = methods[method].tags?.[0] ?? "carpool";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(new Operation(known, path, method, methods[method], key).shown);
    }
  }
  for (const [tag, operations] of groups) page.append(element("h2", {}, tag), ...operations);
} catch (error) {
  page.append(element("p", { className: "status bad" }, String(error)));
}
