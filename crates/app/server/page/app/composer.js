// The field that messages are written in, with its files and its send and stop buttons.
import { Attachments } from './attachments.js';
import { byId } from './dom.js';

/** What is written is kept this long after the last key. */
const DRAFT_MS = 300;

export class Composer {
  #form = byId('composer');
  #field = byId('prompt');
  #send = byId('send');
  #stop = byId('stop');
  #attachments = new Attachments(() => this.#fit());
  #onDraft;
  #draftTimer = 0;

  /** `onSend(text, files)`, `onStop()`, and `onDraft(text)` a moment after something was written. */
  constructor({ onSend, onStop, onDraft }) {
    this.#onDraft = onDraft;
    this.#form.addEventListener('submit', (event) => {
      event.preventDefault();
      const text = this.#field.value.trim();
      if (this.#empty || this.#send.hidden) return;
      const files = this.#attachments.take();
      this.setText('');
      this.keepDraft();
      onSend(text, files);
    });
    this.#field.addEventListener('keydown', (event) => {
      // On a touch keyboard Enter is the only way to a new line; there the button sends.
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing || onTouchOnly()) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    this.#field.addEventListener('input', () => {
      this.#fit();
      clearTimeout(this.#draftTimer);
      this.#draftTimer = setTimeout(() => this.keepDraft(), DRAFT_MS);
    });
    addEventListener('pagehide', () => this.keepDraft());
    this.#stop.addEventListener('click', () => {
      onStop();
      this.focus();
    });
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && !event.defaultPrevented && !this.#stop.hidden && !document.querySelector('dialog[open], .drawer')) onStop();
    });
  }

  /** Keeps what is written now. */
  keepDraft() {
    clearTimeout(this.#draftTimer);
    this.#onDraft(this.#field.value);
  }

  setText(text) {
    this.#field.value = text;
    this.#fit();
  }

  setRunning(running) {
    const focused = document.activeElement === this.#stop;
    this.#send.hidden = running;
    this.#stop.hidden = !running;
    if (focused) this.focus();
  }

  focus() {
    this.#field.focus();
  }

  /** Focuses the field where that does not raise a keyboard over half of the screen. */
  focusGently() {
    if (!onTouchOnly()) this.focus();
  }

  get #empty() {
    return !this.#field.value.trim() && this.#attachments.empty;
  }

  #fit() {
    this.#send.disabled = this.#empty;
    if (CSS.supports('field-sizing', 'content')) return;
    this.#field.style.height = 'auto';
    this.#field.style.height = `${this.#field.scrollHeight}px`;
  }
}

function onTouchOnly() {
  return matchMedia('(pointer: coarse) and (hover: none)').matches;
}
