/** Starts the page. */

import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { ServerView } from "./server.js";
import { SettingsDialog } from "./settings_view.js";
import { openStore } from "./store.js";
import { startTabs } from "./tabs.js";

const part = (id) => document.getElementById(id);

async function showModel() {
  try {
    part("model").textContent = (await getJson("v1/models")).data[0].id;
  } catch { /* the chat and the tab of the server say why */ }
}

function startMenu() {
  const menu = part("menu"), list = part("conversations");
  const open = (isOpen) => {
    list.classList.toggle("open", isOpen);
    menu.setAttribute("aria-expanded", String(isOpen));
  };
  menu.addEventListener("click", () => open(!list.classList.contains("open")));
  list.addEventListener("click", ({ target }) => { if (target.closest(".title, #new")) open(false); });
}

const store = await openStore();
const server = new ServerView(part("server"), (error) => {
  if (error === null) connection.tell(null);
  else if (error.status === 0) connection.watch();
});
let shown = "chat";
const isServerShown = () => shown === "server" && !document.hidden;
const follow = () => (isServerShown() ? server.open() : server.close());
const connection = new Connection(part("connection"), showModel);
const settings = new SettingsDialog(part("settings"), () => { showModel(); follow(); });
const chat = new Chat(store, () => settings.open(), () => connection.watch());

part("open-settings").addEventListener("click", () => settings.open());
startMenu();
document.addEventListener("visibilitychange", follow);
startTabs(document.querySelector("[role=tablist]"), (name) => { shown = name; follow(); });
showModel();
connection.watch();
await chat.start();
document.documentElement.dataset.ready = "true";
