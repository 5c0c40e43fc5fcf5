// Sends the request of a form, and shows the response as it comes; a second click ends it.
const key = document.getElementById("key");

function target(form) {
  const query = new URLSearchParams();
  let path = form.dataset.path;
  for (const field of form.querySelectorAll("[data-in]")) {
    if (field.dataset.in === "path") path = path.replace(`{${field.name}}`, encodeURIComponent(field.value));
    else if (field.value) query.append(field.name, field.value);
  }
  return `.${path}${query.size ? `?${query}` : ""}`;
}

async function send(form, signal) {
  const output = form.querySelector("output");
  const headers = key?.value ? { authorization: `Bearer ${key.value}` } : {};
  const body = form.querySelector("textarea")?.value;
  output.textContent = "";
  try {
    const response = await fetch(target(form), { method: form.dataset.method, headers, body, signal });
    output.textContent = `${response.status} ${response.statusText}\n\n`;
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      output.append(decoder.decode(piece.value, { stream: true }));
    }
  } catch (error) {
    output.append(`\n${error}`);
  }
}

for (const form of document.forms) {
  const button = form.querySelector("button");
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    button.textContent = "Stop";
    await send(form, running.signal);
    button.textContent = "Send";
    running = null;
  });
}
