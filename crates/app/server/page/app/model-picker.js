// Which model answers, where the server has several: a list in the header, for the conversation on show.
import { byId, h } from './dom.js';
import { recall, remember } from './memory.js';
import { percent, shortName } from './state.js';
import { bytes } from './units.js';

/** What new conversations begin with: the model that was chosen last. */
export const lastModel = () => recall('model', null);

export class ModelPicker {
  #server;
  #label = byId('picker');
  #select = byId('model');
  #shown = '';

  /** `onChoose(name)` is called when another model is chosen. */
  constructor(server, onChoose) {
    this.#server = server;
    this.#select.addEventListener('change', () => {
      remember('model', this.#select.value);
      onChoose(this.#select.value);
    });
  }

  /** Shows the models, and which one the conversation has; without one it is the server's. */
  show(model) {
    const { models } = this.#server;
    this.#label.hidden = models.length < 2;
    const options = models.map((entry) => [entry.id, wordsOf(entry, models)]);
    const shown = JSON.stringify(options);
    // An open list must not change for nothing.
    if (shown !== this.#shown) this.#select.replaceChildren(...options.map(([value, words]) => h('option', { value }, words)));
    this.#shown = shown;
    const value = this.#server.known(model) ?? this.#server.model ?? models[0]?.id ?? '';
    if (this.#select.value !== value) this.#select.value = value;
  }
}

function wordsOf({ id, state, size, progress }, models) {
  const isUnique = models.filter((other) => shortName(other.id) === shortName(id)).length === 1;
  const facts = [typeof size === 'number' ? bytes(size) : null, state === 'loading' ? `loading${percent(progressOf(progress))}` : null,
    ['failed', 'rebuilding'].includes(state) ? state : null];
  return [isUnique ? shortName(id) : id, ...facts.filter(Boolean)].join(' · ');
}

/** Progress is a number from 0 to 1, or as in /status. */
function progressOf(progress) {
  return typeof progress === 'number' ? { total: 1, fraction: progress } : progress;
}
