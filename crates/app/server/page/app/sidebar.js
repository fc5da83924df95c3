// The list of conversations: search, import, open, rename, export, delete. On a narrow screen it is a drawer.
import { toMarkdown } from './conversation.js';
import { byId, h, setText } from './dom.js';
import { iconButton } from './icons.js';
import { IMPORT_BYTES_MAX } from './import.js';
import { findIn } from './search.js';
import { toast } from './toast.js';

export class Sidebar {
  #list = byId('conversations');
  #panel = byId('sidebar');
  #menu = byId('menu');
  #narrow = matchMedia('(max-width: 52rem)');
  #actions;
  #rows = new Map();
  #search = byId('search');
  #none = byId('none-found');
  #shown = null; // the arguments of the last call of show
  #groups = new Map(); // when its conversations were last changed -> { element, list }

  /** `actions`: create(), rename(id, title), remove(id), import(text). Opening one is a link to its address. */
  constructor(actions) {
    this.#actions = actions;
    byId('new-chat').addEventListener('click', () => {
      this.close();
      actions.create();
    });
    this.#menu.addEventListener('click', () => this.#setOpen(!document.body.classList.contains('drawer')));
    byId('shade').addEventListener('click', () => this.close());
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && !event.defaultPrevented && document.body.classList.contains('drawer')) this.close();
    });
    this.#search.addEventListener('input', () => this.#shown && this.show(...this.#shown));
    this.#search.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape' || !this.#search.value) return;
      event.stopPropagation(); // the drawer stays open
      event.preventDefault();
      this.#search.value = '';
      this.show(...this.#shown);
    });
    this.#startImport();
    this.#narrow.addEventListener('change', () => this.#setOpen(false));
    this.#setOpen(false);
  }

  /** Rows are kept and changed in place: nothing vanishes between press and release of a button, and a menu stays open. */
  show(conversations, currentId, runningIds) {
    this.#shown = [conversations, currentId, runningIds];
    const query = this.#search.value.trim();
    const found = conversations.map((conversation) => ({ conversation, excerpt: query ? findIn(conversation, query) : '' })).filter(({ excerpt }) => excerpt !== null);
    this.#none.hidden = !query || found.length > 0;
    const rows = found.map(({ conversation, excerpt }) => {
      const row = this.#rows.get(conversation.id) ?? new Row(conversation.id, this.#actions, () => this.close());
      row.show(conversation, excerpt, conversation.id === currentId, runningIds.has(conversation.id));
      return row;
    });
    this.#rows = new Map(rows.map((row) => [row.id, row]));
    this.#place(rows, found.map(({ conversation }) => dayOf(conversation.updated)));
  }

  /** Puts each row into the group of its day. */
  #place(rows, days) {
    const groups = [...new Set(days)].map((day) => {
      if (!this.#groups.has(day)) this.#groups.set(day, newGroup(day));
      return this.#groups.get(day);
    });
    for (const [i, { list }] of groups.entries()) inOrder(list, rows.filter((_, row) => days[row] === [...new Set(days)][i]).map(({ element }) => element));
    inOrder(this.#list, groups.map(({ element }) => element));
  }

  /** Opens the field to search in. */
  search() {
    if (this.#narrow.matches) this.#setOpen(true);
    this.#search.focus();
    this.#search.select();
  }

  close() {
    const open = document.body.classList.contains('drawer');
    this.#setOpen(false);
    if (open) this.#menu.focus();
  }

  #startImport() {
    const picker = byId('pick-import');
    byId('import').addEventListener('click', () => picker.click());
    picker.addEventListener('change', async () => {
      const [file] = picker.files;
      picker.value = ''; // the same file may be picked again
      if (!file) return;
      if (file.size > IMPORT_BYTES_MAX) toast(`${file.name} is larger than ${IMPORT_BYTES_MAX >> 20} MiB.`);
      else this.#actions.import(await file.text());
    });
  }

  #setOpen(open) {
    const narrow = this.#narrow.matches;
    document.body.classList.toggle('drawer', narrow && open);
    this.#menu.setAttribute('aria-expanded', String(narrow && open));
    this.#panel.inert = narrow && !open;
    // As a drawer it keeps what is behind it from everybody.
    this.#panel.setAttribute('role', narrow && open ? 'dialog' : 'complementary');
    this.#panel.toggleAttribute('aria-modal', narrow && open);
    if (narrow && open) this.#panel.setAttribute('aria-modal', 'true');
    byId('stage').inert = narrow && open;
    if (narrow && open) byId('new-chat').focus();
  }
}

/** Children in this order, moving as few as possible; others go. */
function inOrder(parent, children) {
  for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
  children.forEach((child, place) => {
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
}

function newGroup(day) {
  const list = h('ul', { 'aria-label': day });
  return { element: h('section', {}, h('h2', { class: 'day' }, day), list), list };
}

/** When it was, as people say it: today, yesterday, a weekday, a month. */
function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.round((midnight - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);
  if (days <= 0) return 'Today';
  if (days === 1) return 'Yesterday';
  if (days < 7) return 'Last 7 days';
  if (days < 30) return 'Last 30 days';
  return new Date(time).toLocaleDateString('en', { month: 'long', year: 'numeric' });
}

/** One conversation in the list. */
class Row {
  #actions;
  #conversation;
  #title = h('span', {});
  #excerpt = h('small', {});
  #link;
  #more;
  #menu;

  constructor(id, actions, close) {
    this.id = id;
    this.#actions = actions;
    this.#link = h('a', { href: `#chat/${id}`, onclick: close }, this.#title, this.#excerpt);
    this.#menu = h('div', { class: 'menu', id: `menu-${id}`, popover: 'auto' },
      this.#item('Rename', () => this.#rename()),
      this.#item('Export as Markdown', () => this.#export('md', 'text/markdown', toMarkdown)),
      this.#item('Export as JSON', () => this.#export('json', 'application/json', (conversation) => JSON.stringify(conversation, null, 2))),
      this.#item('Delete', () => actions.remove(id), 'danger'));
    this.#more = iconButton('more', 'Actions', null, { popovertarget: this.#menu.id });
    // Fixed to the window, since the list scrolls and would cut it off.
    this.#menu.addEventListener('beforetoggle', () => {
      const { left, bottom } = this.#more.getBoundingClientRect();
      this.#menu.style.left = `${Math.max(8, Math.min(left, innerWidth - 208))}px`;
      this.#menu.style.top = `${Math.min(bottom + 4, innerHeight - 184)}px`;
    });
    this.element = h('li', { 'data-id': id }, this.#link, this.#more, this.#menu);
  }

  /** `excerpt`: what a search found in it, if it was not the title. */
  show(conversation, excerpt, current, running) {
    this.#conversation = conversation;
    setText(this.#title, this.#name);
    setText(this.#excerpt, excerpt);
    this.#excerpt.hidden = !excerpt;
    this.#link.title = `${this.#name}\n${new Date(conversation.updated).toLocaleString()}`;
    if (current) this.#link.setAttribute('aria-current', 'page');
    else this.#link.removeAttribute('aria-current');
    this.#more.setAttribute('aria-label', `Actions for ${this.#name}`);
    this.element.classList.toggle('running', running);
  }

  get #name() {
    return this.#conversation.title || 'New chat';
  }

  #item(label, act, kind = null) {
    return h('button', { type: 'button', class: kind, onclick: () => { this.#menu.hidePopover(); act(); } }, label);
  }

  /** The list may be older than an answer that has just ended. */
  async #export(ending, type, write) {
    const conversation = (await this.#actions.find(this.id)) ?? this.#conversation;
    download(`${this.#name}.${ending}`, type, write(conversation));
  }

  #rename() {
    const { title } = this.#conversation;
    const field = h('input', { 'aria-label': 'Title', value: title, maxlength: '120' });
    const form = h('form', {}, field);
    let ended = false;
    const end = (name, focus) => {
      if (ended) return;
      ended = true;
      this.element.replaceChildren(this.#link, this.#more, this.#menu);
      if (focus) this.#link.focus();
      this.#actions.rename(this.id, name || title);
    };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      end(field.value.trim(), true);
    });
    field.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      event.preventDefault(); // the drawer stays open
      event.stopPropagation();
      end(title, true);
    });
    field.addEventListener('blur', () => end(field.value.trim(), false));
    this.element.replaceChildren(form);
    field.select();
  }
}

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = h('a', { href: address, download: name.replace(/[\\/:*?"<>|\n]+/g, ' ').trim() });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 0);
}
