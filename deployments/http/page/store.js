/** The conversations in this browser's IndexedDB; where a browser forbids it, in memory until the page is closed. */

const HEADS = "heads", BODIES = "bodies";

/** @typedef {{id: string, title: string, updated: number}} Head */

/** @returns {Promise<Store>} */
export async function openStore() {
  try {
    return new Store(await opened());
  } catch {
    return new MemoryStore();
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("orchard", 1);
    opening.onupgradeneeded = () => {
      for (const name of [HEADS, BODIES]) opening.result.createObjectStore(name, { keyPath: "id" });
    };
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const newestFirst = (heads) => heads.sort((one, other) => other.updated - one.updated);

class Store {
  constructor(database) { this._database = database; }

  _in(name, mode = "readonly") { return this._database.transaction(name, mode).objectStore(name); }

  /** @returns {Promise<Head[]>} The newest first. */
  async list() { return newestFirst(await settled(this._in(HEADS).getAll())); }

  /** @param {string} id @returns {Promise<object|undefined>} */
  get(id) { return settled(this._in(BODIES).get(id)); }

  /** @param {object} conversation With a title. */
  async put(conversation) {
    const { id, title, updated } = conversation;
    await settled(this._in(BODIES, "readwrite").put(conversation));
    await settled(this._in(HEADS, "readwrite").put({ id, title, updated }));
  }

  /** @param {string} id */
  async remove(id) {
    for (const name of [BODIES, HEADS]) await settled(this._in(name, "readwrite").delete(id));
  }
}

class MemoryStore {
  constructor() { this._kept = new Map(); }
  async list() { return newestFirst([...this._kept.values()]); }
  async get(id) { return this._kept.get(id); }
  async put(conversation) { this._kept.set(conversation.id, structuredClone(conversation)); }
  async remove(id) { this._kept.delete(id); }
}
