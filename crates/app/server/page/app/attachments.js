// Files that wait to be sent with the message: picked by the button or dropped on the chat, shown as chips.
import { announce } from './announcer.js';
import { byId, h } from './dom.js';
import { FILES_MAX, readText } from './files.js';
import { icon, iconButton } from './icons.js';
import { toast } from './toast.js';

export class Attachments {
  #files = [];
  #chips = byId('attached');
  #onChange;

  /** `onChange()` is called when files were added or removed. */
  constructor(onChange) {
    this.#onChange = onChange;
    const picker = byId('pick-files');
    byId('attach').addEventListener('click', () => picker.click());
    picker.addEventListener('change', () => {
      this.#add([...picker.files]);
      picker.value = ''; // the same file may be picked again
    });
    this.#acceptDrops(byId('chat'));
  }

  get empty() {
    return this.#files.length === 0;
  }

  /** The files; none is left. */
  take() {
    const taken = this.#files;
    this.#files = [];
    this.#show();
    return taken;
  }

  async #add(files) {
    for (const file of files) {
      try {
        if (this.#files.length >= FILES_MAX) throw new Error(`A message takes at most ${FILES_MAX} files`);
        this.#files.push(await readText(file));
        announce(`${file.name} attached`);
      } catch (error) {
        toast(`${error.message}.`);
      }
    }
    this.#show();
  }

  #remove(file) {
    this.#files = this.#files.filter((other) => other !== file);
    this.#show();
    byId('prompt').focus();
  }

  #show() {
    this.#chips.hidden = this.empty;
    this.#chips.replaceChildren(...this.#files.map((file) =>
      h('li', { class: 'chip' }, icon('file'), h('span', {}, file.name), iconButton('close', `Remove ${file.name}`, () => this.#remove(file)))));
    this.#onChange();
  }

  /** A file that is dropped beside `target` must not replace the page, so that is refused everywhere. */
  #acceptDrops(target) {
    const mark = (dropping) => target.classList.toggle('dropping', dropping);
    addEventListener('dragover', (event) => {
      if (!event.dataTransfer?.types.includes('Files')) return;
      event.preventDefault();
      const inside = target.contains(event.target);
      event.dataTransfer.dropEffect = inside ? 'copy' : 'none';
      mark(inside);
    });
    addEventListener('dragleave', (event) => {
      if (!event.relatedTarget) mark(false);
    });
    addEventListener('drop', (event) => {
      mark(false);
      if (!event.dataTransfer?.types.includes('Files')) return;
      event.preventDefault();
      if (target.contains(event.target)) this.#add([...event.dataTransfer.files]);
    });
  }
}
