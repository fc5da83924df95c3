// Conversations in the browser's IndexedDB. Where there is none (some private windows) they last as long as the page.
// Other tabs are told of every change.

const NAME = 'consort';
const TABLE = 'conversations';

export class Store {
  #database;
  #unsaved = new Map();
  #tabs = new BroadcastChannel('consort.conversations');

  constructor(database) {
    this.#database = database;
  }

  static async open() {
    return new Store(await openDatabase().catch(() => null));
  }

  /** Whether conversations outlive the page. */
  get lasting() {
    return this.#database !== null;
  }

  /** All conversations, the latest first. */
  async all() {
    const kept = this.#database ? await this.#run('readonly', (table) => table.getAll()) : [...this.#unsaved.values()];
    return kept.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    return (this.#database ? await this.#run('readonly', (table) => table.get(id)) : this.#unsaved.get(id)) ?? null;
  }

  async put(conversation) {
    if (this.#database) await this.#run('readwrite', (table, transaction) => atOnce(transaction, table.put(conversation)));
    else this.#unsaved.set(conversation.id, conversation);
    this.#tabs.postMessage(conversation.id);
  }

  /**
   * Changes a conversation that is kept, in one step: what other tabs changed meanwhile stays. `change(conversation)` returns
   * whether it changed anything. One that is not kept, since it was deleted, does not come back.
   */
  async change(id, change) {
    let changed = false;
    const apply = (conversation) => {
      changed = Boolean(conversation) && change(conversation);
      return changed;
    };
    if (!this.#database) apply(this.#unsaved.get(id));
    else {
      await this.#run('readwrite', (table, transaction) => {
        const request = table.get(id);
        request.onsuccess = () => apply(request.result) && atOnce(transaction, table.put(request.result));
        return request;
      });
    }
    if (changed) this.#tabs.postMessage(id);
  }

  async remove(id) {
    if (this.#database) await this.#run('readwrite', (table, transaction) => atOnce(transaction, table.delete(id)));
    else this.#unsaved.delete(id);
    this.#tabs.postMessage(id);
  }

  /** Calls `listener(id)` when another tab changed a conversation. */
  onOtherTab(listener) {
    this.#tabs.addEventListener('message', (event) => listener(event.data));
  }

  #run(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.#database.transaction(TABLE, mode);
      const request = act(transaction.objectStore(TABLE), transaction);
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  }
}

/** Has a transaction end with `request`, its last one, also if the page is left before the browser has answered. */
function atOnce(transaction, request) {
  transaction.commit();
  return request;
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: 'id' });
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
}
