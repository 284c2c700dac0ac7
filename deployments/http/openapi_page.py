"""The page of GET /docs: an OpenAPI document in plain HTML, with the document, style and script in one file."""

import base64
import hashlib
import json
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-top: 1px solid #eee; }
.method { display: inline-block; min-width: 4.2rem; font-weight: 700; }
.quiet { color: #666; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; } pre { background: #262626; } details { border-color: #444; }
  th, td { border-color: #333; } .quiet { color: #999; } a { color: #8ab4f8; }
}
"""

SCRIPT = """
const api = JSON.parse(document.getElementById("document").textContent);
const schemas = api.components.schemas;
const page = document.getElementById("page");

function add(parent, tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function resolved(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return [...new Set(choices.map(typeOf))].join(" | ");
  if (schema.type === "array") return "array of " + typeOf(schema.items || {});
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "anything";
}

const LIMITS = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
                "maxItems", "pattern", "default"];

function limitsOf(schema) {
  const all = [schema, ...(schema.anyOf || [])].map(resolved);
  const found = LIMITS.flatMap((name) => all.filter((one) => one[name] !== undefined && one[name] !== null)
    .map((one) => name + " " + JSON.stringify(one[name])));
  return [...new Set(found)].join(", ");
}

function addFields(parent, schema) {
  for (const body of (schema.anyOf || schema.oneOf || [schema]).map(resolved)) {
    if (body.description) add(parent, "p", body.description, "quiet");
    if (!body.properties) { add(parent, "p", typeOf(body)); continue; }
    const table = add(parent, "table");
    const head = add(table, "tr");
    for (const title of ["field", "type", "limits"]) add(head, "th", title);
    for (const [name, field] of Object.entries(body.properties)) {
      const row = add(table, "tr");
      const isRequired = (body.required || []).includes(name);
      add(add(row, "td"), "code", name + (isRequired ? " (required)" : ""));
      add(row, "td", typeOf(field));
      add(row, "td", limitsOf(field), "quiet");
    }
  }
}

function addOperation(path, method, operation) {
  const box = add(page, "details");
  const summary = add(box, "summary");
  add(summary, "span", method.toUpperCase(), "method");
  add(summary, "code", path);
  add(summary, "span", " " + operation.summary, "quiet");
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    add(box, "h4", "Body");
    addFields(box, content.schema);
    if (content.example) {
      add(box, "h4", "Example");
      add(box, "pre", "curl " + location.origin + path + " -H 'Content-Type: application/json' -d '" +
        JSON.stringify(content.example, null, 2).replaceAll("'", "'\\\\''") + "'");
    }
  }
  add(box, "h4", "Responses");
  const table = add(box, "table");
  for (const [status, response] of Object.entries(operation.responses)) {
    const row = add(table, "tr");
    add(row, "td", status);
    add(row, "td", response.description);
  }
}

add(page, "h1", api.info.title + " " + api.info.version);
add(page, "p", api.info.description);
for (const [path, methods] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(methods)) addOperation(path, method, operation);
add(page, "h2", "Schemas");
for (const [name, schema] of Object.entries(schemas)) {
  const box = add(page, "details");
  add(add(box, "summary"), "code", name);
  addFields(box, schema);
}
"""


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def docs_page(document: dict[str, Any]) -> str:
    """Return the HTML page. `<` is escaped in the embedded document, so that it cannot close its script element."""
    data = json.dumps(document).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Orchard API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{STYLE}</style></head><body><main id="page"></main>'
        f'<script type="application/json" id="document">{data}</script><script>{SCRIPT}</script></body></html>'
    )
