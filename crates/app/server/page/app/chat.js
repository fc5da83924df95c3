// The chat: which conversation is on show, and the answers being written. A conversation that is left goes on; so does an answer
// after a reload, and in another tab: the server keeps it, and every page that knows its id reads it.
import { announce } from './announcer.js';
import { resumeAnswer, writeAnswer } from './answer.js';
import { cancelChat, serverStatus, setApiKey } from './api.js';
import { Composer } from './composer.js';
import { showContext } from './context-meter.js';
import { addMessage, isPending, newConversation, pathTo, removeMessage, showBranch } from './conversation.js';
import { openKey, openSettings } from './dialogs.js';
import { byId, h, setText } from './dom.js';
import { draftOf, keepDraft } from './drafts.js';
import { conversationsFrom } from './import.js';
import { ModelPicker, lastModel } from './model-picker.js';
import { lastSettings } from './settings.js';
import { Sidebar } from './sidebar.js';
import { toast } from './toast.js';
import { Transcript } from './transcript.js';

/** A growing answer is kept this often, so that closing the page loses little of it. */
const SAVE_EVERY_MS = 1000;
/** Answers of other pages, or from before a reload, that are read at once. */
const FOLLOWED_MAX = 4;
const IDEAS = ['Explain how a transformer predicts the next word', 'Write a haiku about two computers sharing one thought', 'Compare bubble sort and merge sort in a table'];

export class Chat {
  #store;
  #server;
  #current = null;
  #conversations = [];
  #running = new Map(); // conversation id -> { conversation, message, controller }
  #saving = Promise.resolve(); // the ends of answers that are being kept
  #opening = 0; // counts calls of open: only the last may show what it found
  #followed = new Set(); // ids of answers that this page has asked for, or has read for another: each is read once
  #removed = new Set(); // ids: an answer that was being written there must not bring its conversation back
  #transcript;
  #composer;
  #sidebar;
  #picker;

  constructor(store, server) {
    this.#store = store;
    this.#server = server;
    this.#composer = new Composer({
      onSend: (text, files) => this.#send(text, files),
      onStop: () => this.stop(),
      onDraft: (text) => this.#current && keepDraft(this.#draftName, text),
    });
    this.#sidebar = new Sidebar({
      create: () => go(''),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.#remove(id),
      import: (text) => this.#import(text),
      find: (id) => this.#find(id),
    });
    this.#transcript = new Transcript({
      edit: (message, text) => this.#ask(message.parent, text, message.files),
      rewrite: (message, text) => this.#rewrite(message, text),
      again: (message) => this.#answer(message.parent),
      continue: (message) => this.#continue(message),
      remove: (message) => this.#removeMessage(message),
      branch: (id) => this.#branch(id),
      result: (message, call, text) => this.#giveResult(message, call, text),
      key: () => this.askForKey(),
    });
    this.#picker = new ModelPicker(server, (model) => this.#choose(model));
    byId('open-settings').addEventListener('click', () => this.#openSettings());
    byId('open-key').addEventListener('click', () => this.askForKey());
    byId('ideas').append(...IDEAS.map((idea) => h('button', { type: 'button', class: 'idea', onclick: () => this.#send(idea) }, idea)));
    store.onOtherTab((id) => this.#changedElsewhere(id));
    server.onChange(() => {
      this.#showContext();
      this.#picker.show(this.#current?.model);
    });
  }

  /** Shows a kept conversation, or an empty one. */
  async open(id) {
    const turn = ++this.#opening;
    const focused = document.activeElement;
    if (id && id === this.#current?.id) return;
    const kept = id && (this.#running.get(id)?.conversation ?? (await this.#store.get(id)));
    if (turn !== this.#opening) return;
    if (this.#current) this.#composer.keepDraft();
    const fresh = () => ({ ...newConversation(lastSettings()), ...(lastModel() && { model: lastModel() }) });
    this.#show(kept || fresh());
    this.#composer.setText(draftOf(this.#draftName));
    await this.#list();
    // Who has gone elsewhere meanwhile stays there.
    if ([focused, document.body].includes(document.activeElement)) this.#composer.focusGently();
  }

  askForKey() {
    const check = (key) => serverStatus(null, key).catch((error) => {
      if (error.status === 401) throw error;
    });
    openKey(check, async (key) => {
      setApiKey(key);
      await this.#server.reload();
      this.#followed.clear();
      await this.#list();
    });
  }

  focus() {
    this.#composer.focus();
  }

  /** Begins a new conversation. */
  create() {
    go('');
  }

  search() {
    this.#sidebar.search();
  }

  stop() {
    const running = this.#running.get(this.#current?.id);
    if (!running) return;
    const { answerId } = running.message;
    running.controller.abort();
    // One that the server has not got yet, or has ended, needs nothing.
    if (answerId) cancelChat(answerId).catch(() => {});
  }

  /** The name of the draft of what is on show. */
  get #draftName() {
    return this.#current.messages.length ? this.#current.id : '';
  }

  #show(conversation) {
    this.#current = conversation;
    this.#server.choose(conversation.model);
    this.#picker.show(conversation.model);
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
    this.#transcript.show(this.#current, running?.message.id);
    this.#composer.setRunning(Boolean(running));
    this.#showContext();
  }

  #showContext() {
    if (this.#current) showContext(pathTo(this.#current), this.#server.status?.context);
  }

  /** The model for this conversation from now on. */
  #choose(model) {
    this.#current.model = model;
    this.#server.choose(model);
    this.#picker.show(model);
    if (this.#current.messages.length) this.#keep(this.#current);
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
    if (this.#running.has(this.#current.id)) return;
    const message = addMessage(this.#current, parent, { role: 'assistant' });
    await this.#write(this.#current, message, parent);
  }

  /** Asks the model for the rest of an answer. */
  async #continue(message) {
    if (this.#running.has(this.#current.id)) return;
    const { usage, totalMs = 0, firstMs = 0, earlier = { tokens: 0, ms: 0 } } = message;
    message.earlier = { tokens: earlier.tokens + (usage?.generated ?? 0), ms: earlier.ms + Math.max(totalMs - firstMs, 0) };
    for (const name of ['finish', 'error', 'usage', 'firstMs', 'totalMs']) delete message[name];
    await this.#write(this.#current, message, message.id);
  }

  /** Has `message` written: what follows the message with the id `after`. */
  async #write(conversation, message, after) {
    const running = this.#begin(conversation, message);
    this.#transcript.toEnd();
    go(conversation.id);
    await this.#keep(conversation);

    if (!this.#server.model) await this.#server.refresh();
    const path = pathTo(conversation, after);
    const sentFrom = path.findLast((earlier) => earlier.sentFrom)?.sentFrom;
    const model = () => this.#server.known(conversation.model);
    await writeAnswer(message, path, conversation.settings, this.#server, model, running.controller.signal, {
      onAsk: () => {
        this.#followed.add(message.answerId);
        return this.#saveAnswer(running);
      },
      onChange: () => this.#grown(running),
    });
    if (message.sentFrom && message.sentFrom !== sentFrom) announce('The context is full: the oldest messages are no longer sent');
    await this.#end(running);
  }

  /** Goes on with an answer that another page asked for, or this one before it was reloaded. */
  async #follow(conversation, message) {
    const running = this.#begin(conversation, message);
    running.isFollowing = true;
    this.#followed.add(message.answerId);
    const kept = await resumeAnswer(message, conversation.settings, running.controller.signal, () => this.#grown(running));
    if (kept === 'gone') delete message.answerId;
    await this.#end(running);
  }

  #begin(conversation, message) {
    const running = { conversation, message, controller: new AbortController(), savedAt: performance.now(), savedId: message.answerId };
    this.#running.set(conversation.id, running);
    if (this.#current === conversation) this.#draw();
    return running;
  }

  #grown(running) {
    const { conversation, message } = running;
    if (this.#current === conversation) this.#transcript.showSoon(conversation, message.id);
    if (performance.now() - running.savedAt < SAVE_EVERY_MS) return;
    running.savedAt = performance.now();
    this.#saveAnswer(running);
  }

  async #end(running) {
    const { conversation, message } = running;
    this.#running.delete(conversation.id);
    conversation.updated = Date.now();
    if (this.#current === conversation) this.#draw();
    if (message.error) this.#failed(message.error);
    else if (message.finish) announce(message.finish === 'stopped' ? 'Stopped' : 'Answer complete');
    this.#saving = Promise.all([this.#saving, this.#saveAnswer(running)]);
    await this.#saving;
    await this.#list();
  }

  #failed({ status }) {
    if (status === 401) this.askForKey();
    if (status === 0 || status === 503) this.#server.refresh();
  }

  #branch(id) {
    if (this.#running.has(this.#current.id)) return;
    showBranch(this.#current, id);
    this.#draw();
    this.#keep(this.#current);
  }

  /** Changes the text of an answer, as if the model had said it. */
  #rewrite(message, text) {
    message.content = text;
    message.edited = true;
    this.#transcript.clear();
    this.#draw();
    this.#keep(this.#current);
  }

  #removeMessage(message) {
    const conversation = this.#current;
    if (this.#running.has(conversation.id)) return;
    const putBack = removeMessage(conversation, message.id);
    this.#draw();
    this.#keep(conversation);
    toast(message.role === 'assistant' ? 'Deleted the answer' : 'Deleted the message, and what followed', {
      label: 'Undo',
      run: async () => {
        putBack();
        if (this.#current === conversation) this.#draw();
        await this.#keep(conversation);
      },
    });
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
    const running = this.#running.get(id);
    running?.controller.abort();
    if (running?.message.answerId) cancelChat(running.message.answerId).catch(() => {});
    keepDraft(id, '');
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

  /** Keeps what is written of an answer, and leaves the rest of its conversation as other tabs made it. */
  async #saveAnswer(running) {
    const { conversation, message, savedId } = running;
    const replace = (kept) => {
      const index = kept.messages.findIndex((other) => other.id === message.id);
      const other = kept.messages[index];
      // Another tab has asked again, or has kept the end already.
      if (!other || other.answerId !== savedId || (running.isFollowing && (other.finish || other.error))) return false;
      kept.messages[index] = message;
      kept.updated = Math.max(kept.updated, conversation.updated);
      return true;
    };
    try {
      running.savedId = message.answerId;
      if (!this.#removed.has(conversation.id)) await this.#store.change(conversation.id, replace);
    } catch (error) {
      toast(`The browser could not keep this conversation: ${error.message}`);
    }
  }

  async #list() {
    this.#conversations = await this.#store.all();
    this.#followOthers();
    this.#sidebar.show(this.#conversations, this.#current.id, new Set(this.#running.keys()));
  }

  /** Reads the answers that are being written for other pages. */
  #followOthers() {
    for (const kept of this.#conversations) {
      if (this.#running.size >= FOLLOWED_MAX) return;
      if (this.#running.has(kept.id) || this.#removed.has(kept.id)) continue;
      const conversation = kept.id === this.#current.id ? this.#current : kept;
      const message = conversation.messages.findLast(isPending);
      if (message && !this.#followed.has(message.answerId)) this.#follow(conversation, message);
    }
  }

  async #changedElsewhere(id) {
    let kept, running;
    do {
      await this.#saving; // what has ended here is kept before it is read
      running = this.#running.get(id);
      kept = running || id === this.#current.id ? await this.#store.get(id) : null;
    } while (running !== this.#running.get(id));
    if (running) this.#merge(running, kept);
    else if (kept && id === this.#current.id) this.#show(kept);
    await this.#list();
  }

  /** Takes over what another tab changed around an answer that is being written here. */
  #merge({ conversation, message, controller }, kept) {
    if (!kept?.messages.some((other) => other.id === message.id)) {
      controller.abort(); // deleted there
      return;
    }
    const shape = ({ title, leaf, model, settings, messages }) => JSON.stringify([title, leaf, model, settings, messages.map((other) => other.id)]);
    if (shape(conversation) === shape(kept)) return;
    const messages = kept.messages.map((other) => (other.id === message.id ? message : other));
    Object.assign(conversation, kept, { messages });
    if (this.#current === conversation) this.#show(conversation);
  }
}

/** Goes to a conversation's address; main.js listens and opens it. */
function go(id) {
  const hash = id ? `#chat/${id}` : '#chat';
  if (location.hash !== hash) location.hash = hash;
  else if (!id) dispatchEvent(new HashChangeEvent('hashchange'));
}
