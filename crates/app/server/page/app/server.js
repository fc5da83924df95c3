// What this page knows of the server: polled often while someone looks or the model loads, seldom otherwise.
import { models, serverStatus } from './api.js';

const WATCHED_MS = 1000;
const IDLE_MS = 10000;

export class Server {
  status = null;
  error = null;
  models = []; // as /v1/models lists them
  #chosen = null;
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

  /** The name, if the server has a model of this name, or has not said which it has. */
  known(name) {
    const isThere = !this.models.length || this.models.some(({ id }) => id === name);
    return name && isThere ? name : undefined;
  }

  /** The model whose status is of interest; without a name, the server's own. */
  choose(name) {
    if ((name ?? null) === this.#chosen) return;
    this.#chosen = name ?? null;
    if (this.models.length > 1) this.reload();
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
      this.models = await models();
      const model = this.models.length > 1 ? this.known(this.#chosen) : null;
      this.status = await serverStatus(model);
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    for (const listener of this.#listeners) listener();
  }
}
