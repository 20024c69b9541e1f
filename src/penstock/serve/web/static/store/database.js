// IndexedDB: conversations, their messages and their images. If the browser refuses storage, records are kept in memory.

const NAME = "penstock", VERSION = 1;
const STORES = ["conversations", "messages", "images"];
const memory = Object.fromEntries(STORES.map((store) => [store, new Map()]));
let opened = null;

const promised = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Open the database; resolves to null if the browser refuses storage. */
export function open() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        for (const store of STORES) {
          const created = request.result.createObjectStore(store, { keyPath: "id" });
          if (store !== "conversations") created.createIndex("conversation", "conversation");
        }
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/** All records of a store, or those of one conversation. */
export async function all(store, conversation = null) {
  const database = await open();
  if (!database) return [...memory[store].values()].filter((one) => !conversation || one.conversation === conversation);
  const source = database.transaction(store).objectStore(store);
  return promised(conversation ? source.index("conversation").getAll(conversation) : source.getAll());
}

export async function put(store, ...records) {
  const database = await open();
  if (!database) return records.forEach((record) => memory[store].set(record.id, structuredClone(record)));
  const target = database.transaction(store, "readwrite").objectStore(store);
  await Promise.all(records.map((record) => promised(target.put(record))));
}

/** Delete a conversation with its messages and images. */
export async function remove(conversation) {
  const database = await open();
  for (const store of ["messages", "images"]) {
    const ids = (await all(store, conversation)).map((one) => one.id);
    if (!database) ids.forEach((id) => memory[store].delete(id));
    else {
      const target = database.transaction(store, "readwrite").objectStore(store);
      await Promise.all(ids.map((id) => promised(target.delete(id))));
    }
  }
  if (!database) memory.conversations.delete(conversation);
  else await promised(database.transaction("conversations", "readwrite").objectStore("conversations").delete(conversation));
}
