// The messages on show, and where the reader is in them: at the end, which the page then follows, or further up.
import { startOf } from './context.js';
import { pathTo, versionsOf } from './conversation.js';
import { byId, h } from './dom.js';
import { MessageView } from './message.js';

/** Within this many pixels of the end counts as the end. */
const END_PX = 48;

export class Transcript {
  #root = byId('transcript');
  #scroll = byId('scroll');
  #latest = byId('latest');
  #views = new Map(); // message id -> MessageView
  #forgotten = h('p', { class: 'forgotten', role: 'note' }, h('span', {}, 'The context is full: messages above this line are no longer sent.'));
  #actions;
  #follows = true;
  #frame = 0;

  constructor(actions) {
    this.#actions = actions;
    this.#scroll.addEventListener('scroll', () => this.#look(), { passive: true });
    this.#latest.addEventListener('click', () => this.toEnd());
    new ResizeObserver(() => this.#keepPlace()).observe(this.#root);
    new ResizeObserver(() => this.#keepPlace()).observe(this.#scroll);
  }

  /** Shows the conversation's branch; `runningId` is the message that is being written, if any. */
  show(conversation, runningId) {
    cancelAnimationFrame(this.#frame);
    const path = pathTo(conversation);
    const ids = new Set(path.map((message) => message.id));
    for (const [id, view] of this.#views) {
      if (ids.has(id)) continue;
      view.element.remove();
      this.#views.delete(id);
    }
    const answered = new Set(path.map((message) => message.callId));
    const elements = path.map((message, index) => {
      let view = this.#views.get(message.id);
      if (!view) this.#views.set(message.id, (view = new MessageView(message, this.#actions)));
      view.show({ running: message.id === runningId, versions: versionsOf(conversation, message).map(({ id }) => id), answered, last: index === path.length - 1 });
      return view.element;
    });
    const start = startOf(path);
    if (start > 0) elements.splice(start, 0, this.#forgotten);
    else this.#forgotten.remove();
    elements.forEach((element, i) => {
      if (this.#root.children[i] !== element) this.#root.insertBefore(element, this.#root.children[i] ?? null);
    });
  }

  /** As show, at most once a frame: chunks may come faster than the screen. */
  showSoon(conversation, runningId) {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.show(conversation, runningId));
  }

  /** Forgets everything on show, before another conversation. */
  clear() {
    cancelAnimationFrame(this.#frame);
    this.#views.clear();
    this.#root.replaceChildren();
    this.#follows = true;
  }

  toEnd() {
    this.#follows = true;
    this.#keepPlace();
  }

  #keepPlace() {
    if (this.#follows) this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#look();
  }

  #look() {
    const below = this.#scroll.scrollHeight - this.#scroll.clientHeight - this.#scroll.scrollTop;
    this.#follows = below < END_PX;
    this.#latest.hidden = this.#follows;
  }
}
