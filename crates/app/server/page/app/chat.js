// The chat: which conversation is on show, and the answers being written. A conversation that is left goes on.
import { announce } from './announcer.js';
import { writeAnswer } from './answer.js';
import { serverStatus, setApiKey } from './api.js';
import { Composer } from './composer.js';
import { showContext } from './context-meter.js';
import { addMessage, newConversation, pathTo, showBranch } from './conversation.js';
import { openKey, openSettings } from './dialogs.js';
import { byId, h, setText } from './dom.js';
import { conversationsFrom } from './import.js';
import { lastSettings } from './settings.js';
import { Sidebar } from './sidebar.js';
import { toast } from './toast.js';
import { Transcript } from './transcript.js';

/** A growing answer is kept this often, so that closing the page loses little of it. */
const SAVE_EVERY_MS = 1000;
const IDEAS = ['Explain how a transformer predicts the next word', 'Write a haiku about two computers sharing one thought', 'Compare bubble sort and merge sort in a table'];

export class Chat {
  #store;
  #server;
  #current = null;
  #conversations = [];
  #running = new Map(); // conversation id -> { conversation, messageId, controller }
  #opening = 0; // counts calls of open: only the last may show what it found
  #removed = new Set(); // ids: an answer that was being written there must not bring its conversation back
  #transcript;
  #composer;
  #sidebar;

  constructor(store, server) {
    this.#store = store;
    this.#server = server;
    this.#composer = new Composer({ onSend: (text, files) => this.#send(text, files), onStop: () => this.#stop() });
    this.#sidebar = new Sidebar({
      create: () => go(''),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.#remove(id),
      import: (text) => this.#import(text),
      find: (id) => this.#find(id),
    });
    this.#transcript = new Transcript({
      edit: (message, text) => this.#ask(message.parent, text, message.files),
      again: (message) => this.#answer(message.parent),
      branch: (id) => this.#branch(id),
      result: (message, call, text) => this.#giveResult(message, call, text),
      key: () => this.askForKey(),
    });
    byId('open-settings').addEventListener('click', () => this.#openSettings());
    byId('open-key').addEventListener('click', () => this.askForKey());
    byId('ideas').append(...IDEAS.map((idea) => h('button', { type: 'button', class: 'idea', onclick: () => this.#send(idea) }, idea)));
    store.onOtherTab((id) => this.#changedElsewhere(id));
    server.onChange(() => this.#showContext());
  }

  /** Shows a kept conversation, or an empty one. */
  async open(id) {
    const turn = ++this.#opening;
    if (id && id === this.#current?.id) return;
    const kept = id && (this.#running.get(id)?.conversation ?? (await this.#store.get(id)));
    if (turn !== this.#opening) return;
    this.#show(kept || newConversation(lastSettings()));
    await this.#list();
    this.#composer.focusGently();
  }

  askForKey() {
    const check = (key) => serverStatus(key).catch((error) => {
      if (error.status === 401) throw error;
    });
    openKey(check, (key) => {
      setApiKey(key);
      return this.#server.reload();
    });
  }

  focus() {
    this.#composer.focus();
  }

  #show(conversation) {
    this.#current = conversation;
    this.#transcript.clear();
    this.#draw();
  }

  #draw() {
    const running = this.#running.get(this.#current.id);
    const begun = this.#current.messages.length > 0;
    byId('welcome').hidden = begun;
    setText(byId('chat-title'), this.#current.title || 'New chat');
    document.title = begun ? `${this.#current.title} · consort` : 'consort';
    byId('tab-chat').setAttribute('href', begun ? `#chat/${this.#current.id}` : '#chat');
    this.#transcript.show(this.#current, running?.messageId);
    this.#composer.setRunning(Boolean(running));
    this.#showContext();
  }

  #showContext() {
    if (this.#current) showContext(pathTo(this.#current), this.#server.status?.context);
  }

  #send(text, files = []) {
    this.#ask(this.#current.leaf, text, files);
  }

  /** Adds what the user says after `parent`, and the answer to it. */
  #ask(parent, text, files = []) {
    if (this.#running.has(this.#current.id)) return;
    const { id } = addMessage(this.#current, parent, { role: 'user', content: text, ...(files.length && { files }) });
    this.#answer(id);
    this.#composer.focusGently();
  }

  async #giveResult(message, call, text) {
    const conversation = this.#current;
    const last = pathTo(conversation).at(-1);
    const { id } = addMessage(conversation, last.id, { role: 'tool', callId: call.id, content: text });
    const given = new Set(pathTo(conversation).map(({ callId }) => callId));
    if (message.toolCalls.every((other) => given.has(other.id))) return this.#answer(id);
    this.#draw();
    await this.#keep(conversation);
  }

  /** Asks the model for what follows `parent`. */
  async #answer(parent) {
    const conversation = this.#current;
    if (this.#running.has(conversation.id)) return;
    const message = addMessage(conversation, parent, { role: 'assistant' });
    const controller = new AbortController();
    this.#running.set(conversation.id, { conversation, messageId: message.id, controller });
    this.#draw();
    this.#transcript.toEnd();
    go(conversation.id);
    await this.#keep(conversation);

    if (!this.#server.model) await this.#server.refresh();
    let savedAt = performance.now();
    const path = pathTo(conversation, parent);
    const sentFrom = path.findLast((earlier) => earlier.sentFrom)?.sentFrom;
    await writeAnswer(message, path, conversation.settings, this.#server, controller.signal, () => {
      if (this.#current === conversation) this.#transcript.showSoon(conversation, message.id);
      if (performance.now() - savedAt < SAVE_EVERY_MS) return;
      savedAt = performance.now();
      this.#save(conversation);
    });

    this.#running.delete(conversation.id);
    conversation.updated = Date.now();
    if (this.#current === conversation) this.#draw();
    if (message.error) this.#failed(message.error);
    else announce(message.finish === 'stopped' ? 'Stopped' : 'Answer complete');
    if (message.sentFrom && message.sentFrom !== sentFrom) announce('The context is full: the oldest messages are no longer sent');
    await this.#keep(conversation);
  }

  #failed({ status }) {
    if (status === 401) this.askForKey();
    if (status === 0 || status === 503) this.#server.refresh();
  }

  #stop() {
    this.#running.get(this.#current.id)?.controller.abort();
  }

  #branch(id) {
    if (this.#running.has(this.#current.id)) return;
    showBranch(this.#current, id);
    this.#draw();
    this.#keep(this.#current);
  }

  #openSettings() {
    const conversation = this.#current;
    openSettings(conversation.settings, this.#server.status, (settings) => {
      conversation.settings = settings;
      if (conversation.messages.length) this.#keep(conversation);
    });
  }

  async #rename(id, title) {
    const conversation = await this.#find(id);
    if (conversation && conversation.title !== title) {
      conversation.title = title;
      await this.#keep(conversation);
    } else {
      await this.#list();
    }
  }

  async #remove(id) {
    const conversation = await this.#find(id);
    this.#removed.add(id);
    this.#running.get(id)?.controller.abort();
    await this.#store.remove(id);
    toast(`Deleted “${conversation.title || 'New chat'}”`, {
      label: 'Undo',
      run: async () => {
        this.#removed.delete(id);
        await this.#keep(conversation);
        go(id);
      },
    });
    if (this.#current.id === id) go('');
    await this.#list();
  }

  async #import(text) {
    let conversations = [];
    let imported = 0;
    try {
      conversations = conversationsFrom(text);
      for (const conversation of conversations) {
        await this.#store.put(conversation);
        imported += 1;
      }
      toast(imported === 1 ? 'Imported one conversation.' : `Imported ${imported} conversations.`);
    } catch (error) {
      toast(`${imported ? `Imported ${imported} of ${conversations.length}` : 'Nothing was imported'}: ${error.message}.`);
    } finally {
      await this.#list();
      if (imported) go(conversations[0].id);
    }
  }

  /** The conversation as this page holds it, if it does; otherwise as it is kept. */
  async #find(id) {
    if (this.#current.id === id) return this.#current;
    return this.#running.get(id)?.conversation ?? this.#store.get(id);
  }

  /** Keeps a conversation and shows it in the list. */
  async #keep(conversation) {
    await this.#save(conversation);
    await this.#list();
  }

  async #save(conversation) {
    try {
      if (!this.#removed.has(conversation.id)) await this.#store.put(conversation);
    } catch (error) {
      toast(`The browser could not keep this conversation: ${error.message}`);
    }
  }

  async #list() {
    this.#conversations = await this.#store.all();
    this.#sidebar.show(this.#conversations, this.#current.id, new Set(this.#running.keys()));
  }

  async #changedElsewhere(id) {
    if (id === this.#current.id && !this.#running.has(id)) {
      const kept = await this.#store.get(id);
      if (kept) this.#show(kept);
    }
    await this.#list();
  }
}

/** Goes to a conversation's address; main.js listens and opens it. */
function go(id) {
  const hash = id ? `#chat/${id}` : '#chat';
  if (location.hash !== hash) location.hash = hash;
  else if (!id) dispatchEvent(new HashChangeEvent('hashchange'));
}
