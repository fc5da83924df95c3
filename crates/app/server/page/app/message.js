// One message on the page. `show` may be called as often as the message changes: it touches what changed.
import { announce } from './announcer.js';
import { copyButton } from './clipboard.js';
import { h, setText } from './dom.js';
import { canContinue } from './conversation.js';
import { icon, iconButton } from './icons.js';
import { LiveMarkdown } from './markdown/live.js';
import { spokenText } from './markdown/maths.js';
import { bytes } from './units.js';
import { sentence } from './words.js';

const NAMES = { user: 'You', assistant: 'Assistant', tool: 'Tool result' };

export class MessageView {
  #actions;
  #message;
  #body = h('div', { class: 'body' });
  #parts = new Map(); // name -> element
  #markdown;

  /** `actions`: edit(message, text), rewrite(message, text), again(message), continue(message), remove(message), branch(id), result(message, call, text), key(). */
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.element = h('article', { class: `message ${message.role}`, 'aria-label': NAMES[message.role], 'data-id': message.id });
  }

  /**
   * `running`: the answer is still being written. `versions`: ids of this message and its branches. `answered`: ids of tool calls
   * with a result. `last`: nothing follows it.
   */
  show({ running, versions, answered, last }) {
    const message = this.#message;
    this.element.classList.toggle('running', running);
    this.element.setAttribute('aria-busy', String(running));
    if (message.role === 'assistant') {
      this.#showReasoning(running);
      this.#showMarkdown(running);
      this.#showCalls(running, answered);
      this.#part('wait', running && !message.content && !message.reasoning && !message.toolCalls, () =>
        h('p', { class: 'wait' }, h('span', { class: 'unseen' }, 'Waiting for the answer'), ...[0, 1, 2].map(() => h('i', { 'aria-hidden': 'true' }))));
      this.#showError(last);
    } else {
      this.#part('files', Boolean(message.files?.length), () => h('ul', { class: 'chips', 'aria-label': 'Files' }, ...message.files.map(chip)));
      if (this.#part('text', Boolean(message.content), () => this.#body)) setText(this.#body, message.content);
    }
    this.#showBar(running, versions, last);
  }

  /** Turns the message into a field to change it in. What the user said is sent again, what the model said is kept. */
  edit() {
    const isAnswer = this.#message.role === 'assistant';
    const area = h('textarea', { 'aria-label': isAnswer ? 'Edit the answer' : 'Edit the message', rows: '1' });
    area.value = this.#message.content;
    const form = h('form', { class: 'edit' }, area,
      h('div', { class: 'actions' },
        h('button', { type: 'button', class: 'plain', onclick: () => done() }, 'Cancel'),
        h('button', { type: 'submit', class: 'primary' }, isAnswer ? 'Save' : 'Send')));
    const done = () => {
      form.replaceWith(...hidden);
      this.element.querySelector('[data-edit]')?.focus();
    };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (isAnswer) this.#actions.rewrite(this.#message, area.value.trim());
      else if (text || this.#message.files?.length) this.#actions.edit(this.#message, text);
    });
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') done();
      else if (event.key === 'Enter' && !event.shiftKey && !isAnswer && !event.isComposing && event.target === area) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const hidden = [...this.element.childNodes];
    this.element.replaceChildren(form);
    area.focus();
  }

  #showReasoning(running) {
    const { reasoning, content } = this.#message;
    const details = this.#part('reasoning', Boolean(reasoning), () =>
      h('details', { class: 'fold' }, h('summary', {}), h('div', { class: 'folded' })));
    if (!details) return;
    setText(details.firstChild, running && !content ? 'Thinking…' : 'Thoughts');
    setText(details.lastChild, reasoning.trim());
  }

  #showMarkdown(running) {
    if (!this.#part('text', Boolean(this.#message.content), () => this.#body)) return;
    this.#markdown ??= new LiveMarkdown(this.#body, running ? announceBlock : undefined);
    this.#body.classList.add('markdown');
    this.#markdown.update(this.#message.content.replaceAll('\r\n', '\n'), !running);
  }

  #showCalls(running, answered) {
    for (const [i, call] of (this.#message.toolCalls ?? []).entries()) {
      if (!call) continue;
      const card = this.#part(`call-${i}`, true, () => h('details', { class: 'fold call' },
        h('summary', {}, icon('tool'), h('span', {})), h('pre', { tabindex: '0', 'aria-label': 'Arguments' }, h('code', {}))));
      setText(card.querySelector('summary span'), `Calls ${call.name}`);
      setText(card.querySelector('code'), running ? call.arguments : indented(call.arguments));
      const asks = !running && !answered.has(call.id);
      if (asks && !card.querySelector('form')) card.append(this.#resultForm(call));
      if (!asks) card.querySelector('form')?.remove();
      if (asks) card.open = true;
    }
  }

  #resultForm(call) {
    const area = h('textarea', { rows: '2', 'aria-label': `Result of ${call.name}`, placeholder: 'What the tool answers', class: 'mono' });
    return h('form', {
      class: 'result',
      onsubmit: (event) => {
        event.preventDefault();
        this.#actions.result(this.#message, call, area.value);
      },
    }, area, h('button', { type: 'submit', class: 'plain' }, 'Give result'));
  }

  #showError(last) {
    const { error } = this.#message;
    const box = this.#part('error', Boolean(error), () => h('div', { class: 'error', role: 'alert' },
      h('p', {}),
      h('button', { type: 'button', class: 'plain', onclick: () => this.#actions.again(this.#message) }, 'Try again'),
      h('button', { type: 'button', class: 'plain continue', onclick: () => this.#actions.continue(this.#message) }, 'Continue'),
      error.status === 401 && h('button', { type: 'button', class: 'plain', onclick: () => this.#actions.key() }, 'Enter API key')));
    if (!box) return;
    box.querySelector('.continue').hidden = !last || !canContinue(this.#message);
    const when = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : '';
    const advice = error.code === 'context_length_exceeded' ? ' Shorten the message, or the system prompt.' : '';
    setText(box.firstChild, `${sentence(error.text)}${when}${advice}`);
  }

  #showBar(running, versions, last) {
    const { role, content, error } = this.#message;
    const bar = this.#part('bar', !running, () => h('div', { class: 'bar' }));
    if (!bar) return;
    const now = versions.indexOf(this.#message.id);
    const turn = (to, name, label) => iconButton(name, label, () => this.#actions.branch(versions[to]), { disabled: !versions[to] });
    const focused = bar.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
    bar.replaceChildren(
      ...(versions.length > 1 ? [turn(now - 1, 'left', 'Earlier version'), h('span', { class: 'count' }, `${now + 1} / ${versions.length}`), turn(now + 1, 'right', 'Later version')] : []),
      ...(content ? [copyButton(() => content, 'Copy message')] : []),
      ...(role === 'user' ? [iconButton('edit', 'Edit and retry', () => this.edit(), { 'data-edit': true })] : []),
      ...(role === 'assistant' && content ? [iconButton('edit', 'Edit answer', () => this.edit(), { 'data-edit': true })] : []),
      ...(role === 'assistant' && !error ? [iconButton('again', 'Regenerate', () => this.#actions.again(this.#message))] : []),
      iconButton('trash', role === 'assistant' ? 'Delete answer' : 'Delete message', () => this.#actions.remove(this.#message)),
      ...(last && !error && canContinue(this.#message) ? [continueButton(() => this.#actions.continue(this.#message))] : []),
      ...(role === 'assistant' ? [h('span', { class: 'facts' }, factsOf(this.#message))] : []),
    );
    if (focused) bar.querySelector(`[aria-label="${focused}"]`)?.focus();
    bar.classList.toggle('quietly', role === 'user' && versions.length < 2);
  }

  /** The part of this name, made on first need and put in its place; null, and gone, when not wanted. */
  #part(name, wanted, make) {
    const have = this.#parts.get(name);
    if (!wanted) {
      have?.remove();
      this.#parts.delete(name);
      return null;
    }
    if (have) return have;
    const made = make();
    this.#parts.set(name, made);
    const after = [...this.#parts].filter(([other]) => order(other) > order(name)).sort(([a], [b]) => order(a) - order(b))[0];
    this.element.insertBefore(made, after ? after[1] : null);
    return made;
  }
}

/** Parts stand in this order whenever they appear; calls of tools in the order of their index. */
function order(name) {
  const [kind, index = '0'] = name.split('-');
  return ['reasoning', 'files', 'text', 'call', 'wait', 'error', 'bar'].indexOf(kind) * 1000 + Number(index);
}

function continueButton(onclick) {
  return h('button', { type: 'button', class: 'plain continue', 'aria-label': 'Continue', onclick }, icon('play'), 'Continue');
}

function announceBlock(element) {
  const lines = element.querySelector('pre')?.textContent.split('\n').length;
  announce(lines ? `Code, ${lines} lines` : spokenText(element));
}

/** A file of a message; what is in it opens on a press. */
function chip({ name, text }) {
  return h('li', {}, h('details', { class: 'fold' },
    h('summary', {}, icon('file'), h('span', {}, `${name} · ${bytes(new TextEncoder().encode(text).length)}`)),
    h('pre', { tabindex: '0', role: 'region', 'aria-label': name }, h('code', {}, text))));
}

function factsOf({ finish, error, usage, firstMs, totalMs, edited, earlier = { tokens: 0, ms: 0 } }) {
  const facts = [];
  const tokens = (usage?.generated ?? 0) + earlier.tokens;
  const ms = totalMs - firstMs + earlier.ms;
  if (edited) facts.push('edited');
  if (!finish && !error) facts.push('interrupted'); // the page was closed meanwhile
  if (finish === 'stopped') facts.push('stopped');
  if (finish === 'length') facts.push('reached Max tokens');
  if (finish === 'context') facts.push('the context is full');
  if (tokens) facts.push(tokens === 1 ? '1 token' : `${tokens} tokens`);
  if (tokens > 1 && ms > 0) facts.push(`${((tokens - 1) * 1000 / ms).toFixed(1)} tokens/s`);
  if (firstMs !== undefined) facts.push(`time to first token ${(firstMs / 1000).toFixed(2)} s`);
  return facts.join(' · ');
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
