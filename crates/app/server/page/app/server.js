// What this page knows of the server: polled often while someone looks or the model loads, seldom otherwise.
import { serverStatus } from './api.js';

const WATCHED_MS = 1000;
const IDLE_MS = 10000;

export class Server {
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

  /** The model that answers; unknown until the server has said it. */
  get model() {
    return this.status?.model ?? undefined;
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

  /** Asks for the status with the key and the server of now. */
  async reload() {
    await this.#asking;
    await this.refresh();
  }

  async #ask() {
    try {
      this.status = await serverStatus();
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    for (const listener of this.#listeners) listener();
  }
}
