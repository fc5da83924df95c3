// What this page knows of the server: polled often while someone looks or the model loads, seldom otherwise.
import { modelNames, serverStatus } from './api.js';

const WATCHED_MS = 1000;
const IDLE_MS = 10000;

export class Server {
  models = [];
  status = null;
  error = null;
  #watched = false;
  #timer = 0;
  #asking = null;
  #listeners = [];

  constructor() {
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) this.refresh();
    });
  }

  /** The model to ask; the server takes its own when the name is not known yet. */
  get model() {
    return this.models[0] ?? this.status?.model ?? undefined;
  }

  get ready() {
    return this.status?.state === 'ready' && this.error === null;
  }

  /** Calls `listener()` after every answer of the server, or the lack of one. */
  onChange(listener) {
    this.#listeners.push(listener);
  }

  /** While watched, the status is asked for every second. */
  watch(watched) {
    this.#watched = watched;
    this.refresh();
  }

  /** Asks now, and goes on asking. */
  refresh() {
    this.#asking ??= this.#ask().finally(() => {
      this.#asking = null;
      clearTimeout(this.#timer);
      if (!document.hidden) this.#timer = setTimeout(() => this.refresh(), this.#watched || !this.ready ? WATCHED_MS : IDLE_MS);
    });
    return this.#asking;
  }

  async #ask() {
    try {
      this.status = await serverStatus();
      this.error = null;
      if (this.ready && !this.models.length) this.models = await modelNames();
    } catch (error) {
      this.error = error;
    }
    for (const listener of this.#listeners) listener();
  }
}
