// Markdown that grows. Each update parses the last two blocks only and touches only elements that changed: an answer of
// any length costs the same per token, and a selection in what is already written stays.
//
// Why two: a line that is still incomplete may look like the start of a block ("#" before it is "#tag") and then turn out
// to continue the paragraph before it. A block with two more after it ended on complete lines and cannot change.
import { noteLabels, parseBlocks } from './blocks.js';
import { renderBlock } from './render.js';

export class LiveMarkdown {
  #root;
  #text = '';
  #blocks = []; // { type, start, raw, text, growing, element }
  #settled = 0;
  #notes = new Set();
  #onSettled;

  /** Renders into `root`. `onSettled(element)` is called once for each block that will not change any more. */
  constructor(root, onSettled = () => {}) {
    this.#root = root;
    this.#onSettled = onSettled;
  }

  /** Shows `text`, of which more may come unless `done`. */
  update(text, done = false) {
    if (!text.startsWith(this.#text)) this.#clear();
    this.#text = text;
    this.#findNotes();
    const keep = Math.max(this.#blocks.length - 2, 0);
    const from = this.#blocks[keep]?.start ?? 0;
    const blocks = parseBlocks(text.slice(from));
    for (const extra of this.#blocks.splice(keep + blocks.length)) extra.element.remove();
    blocks.forEach((block, i) => this.#show(keep + i, { ...block, start: from + block.start }, !done && i === blocks.length - 1));
    this.#settle(done ? this.#blocks.length : Math.max(this.#blocks.length - 2, 0));
  }

  /** Notes stand at the end, and what refers to them before: that is drawn again when its note comes. */
  #findNotes() {
    const notes = this.#text.includes('[^') ? noteLabels(this.#text) : this.#notes;
    if (notes.size === this.#notes.size) return;
    this.#notes = notes;
    for (const shown of this.#blocks) {
      if (!shown.raw.includes('[^')) continue;
      const element = renderBlock(parseBlocks(shown.raw)[0], shown.growing, notes);
      shown.element.replaceWith(element);
      shown.element = element;
    }
  }

  #show(index, block, growing) {
    const shown = this.#blocks[index];
    if (shown?.raw === block.raw && shown.type === block.type && shown.growing === growing) {
      shown.start = block.start;
      return;
    }
    let element = shown?.element;
    if (continues(shown, block, growing)) {
      element.querySelector('code').firstChild.appendData(block.text.slice(shown.text.length));
    } else {
      element = renderBlock(block, growing, this.#notes);
      if (shown?.type === 'details' && block.type === 'details') element.open = shown.element.open;
      if (shown) shown.element.replaceWith(element);
      else this.#root.append(element);
    }
    const { type, start, raw, text, language } = block;
    this.#blocks[index] = { type, start, raw, text, language, growing, element };
  }

  #settle(count) {
    for (; this.#settled < count; this.#settled += 1) this.#onSettled(this.#blocks[this.#settled].element);
  }

  #clear() {
    for (const block of this.#blocks) block.element.remove();
    this.#blocks = [];
    this.#settled = 0;
    this.#notes = new Set();
  }
}

/** Code of which only the end is new: its element stays, and so does a selection in it. */
function continues(shown, block, growing) {
  return shown?.growing && growing && shown.type === 'code' && block.type === 'code' && shown.language === block.language && block.text.startsWith(shown.text);
}
