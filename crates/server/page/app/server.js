// What this page knows of the server: polled often while someone looks or the model loads, seldom otherwise.
import { modelNames, serverStatus } from './api.js';

const WATCHED_MS = 1000;
const IDLE_MS = 10000;

export class Server {
  models = [];
  status = null;
  error = null;
  #namedFor = null; // the model of the status for which `models` was asked
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
    return this.models[0] ?? this.status?.model ?? undefined;
  }

  get ready() {
    return this.status?.state === 'ready' && this.error === null;
  }

  /** The model to ask: the wanted one if it is served. What was served yesterday may not be today. */
  modelFor(wanted) {
    return this.models.includes(wanted) ? wanted : this.model;
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

  /** Asks for the status and the models with the key and the server of now. */
  async reload() {
    await this.#asking;
    this.#namedFor = null;
    await this.refresh();
  }

  async #ask() {
    try {
      this.status = await serverStatus();
      this.error = null;
      if (this.status.model !== this.#namedFor) this.models = [];
      if (this.ready && this.status.model !== this.#namedFor) {
        this.models = await modelNames();
        this.#namedFor = this.status.model;
      }
    } catch (error) {
      this.error = error;
    }
    for (const listener of this.#listeners) listener();
  }
}
