// Adds a machine to the cluster: a code that a person types there, and the command for it, also as a QR code. Shown to who may call
// it: with an API key, or on the server's own machine.
import { apiKey, invitation } from './api.js';
import { copyButton } from './clipboard.js';
import { h, s, setText } from './dom.js';
import { qrCode } from './qr.js';
import { sentence } from './words.js';

/** Light squares around a code, without which cameras do not find it. */
const QUIET = 4;

export class Invitation {
  #open = false;
  #button = h('button', { type: 'button', class: 'plain', onclick: () => this.#ask('POST') }, 'Add a machine');
  #close = h('button', { type: 'button', class: 'plain', onclick: () => this.#ask('DELETE') }, 'Close');
  #said = h('p', { class: 'hint', role: 'status' });
  #code = h('output', { class: 'code-digits', 'aria-label': 'Code' });
  #command = h('code', {});
  #left = h('p', { class: 'hint' });
  #picture = h('div', { class: 'qr' });
  #drawn = '';
  #sheet = h('div', { class: 'invitation', hidden: true }, this.#picture, h('div', {},
    h('p', {}, 'On the other machine, type'), h('p', { class: 'command' }, this.#command, copyButton(() => this.#command.textContent, 'Copy the command')),
    h('p', {}, 'and give it this code:'), this.#code, this.#left));
  element = h('section', { class: 'card', id: 'invitation', 'aria-label': 'Add a machine', hidden: true },
    h('h2', {}, 'Add a machine'), this.#sheet, this.#said, h('div', { class: 'actions' }, this.#button, this.#close));

  constructor() {
    this.#show(null);
  }

  /** Called with each answer about the cluster: `kind` is its kind. */
  async refresh(kind) {
    this.element.hidden = kind !== 'chain' || !(apiKey() || isOwnMachine());
    if (this.#open) await this.#ask('GET');
  }

  async #ask(method) {
    try {
      this.#show(await invitation(method));
    } catch (error) {
      this.#show(null);
      setText(this.#said, sentence(error.message));
    }
  }

  #show(told) {
    const { state, code, seconds_left: seconds, tries_left: tries, command, command_with_address: elsewhere, joined, reason } = told ?? {};
    this.#open = state === 'open';
    this.#sheet.hidden = !this.#open;
    this.#button.hidden = this.#open;
    this.#close.hidden = !this.#open;
    setText(this.#said, state === 'joined' ? `${joined?.name ?? 'A machine'} has joined.` : reason ? sentence(reason) : this.#open ? '' : 'It then runs a part of the layers.');
    if (!this.#open) return;
    setText(this.#code, String(code ?? '').replace(/^(\d{3})(\d{3})$/, '$1 $2'));
    setText(this.#command, command ?? '');
    setText(this.#left, [typeof seconds === 'number' ? `Open for ${Math.ceil(seconds / 60)} min` : null, typeof tries === 'number' ? `${tries} ${tries === 1 ? 'try' : 'tries'}` : null].filter(Boolean).join(', '));
    this.#draw(elsewhere ?? command ?? '');
  }

  #draw(text) {
    if (this.#drawn === text) return;
    this.#drawn = text;
    const rows = qrCode(text);
    this.#picture.hidden = !rows;
    if (!rows) return;
    const size = rows.length + 2 * QUIET;
    const squares = rows.flatMap((row, y) => row.flatMap((dark, x) => (dark ? [`M${x + QUIET} ${y + QUIET}h1v1h-1z`] : []))).join('');
    this.#picture.replaceChildren(s('svg', { viewBox: `0 0 ${size} ${size}`, role: 'img', 'aria-label': `QR code: ${text}`, 'shape-rendering': 'crispEdges' }, s('path', { d: squares })));
  }
}

function isOwnMachine() {
  return /^(localhost|.*\.localhost|127(\.\d+){3}|\[::1\])$/.test(location.hostname);
}
