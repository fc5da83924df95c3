// A conversation as a tree of messages. Editing and asking again add a branch beside the old one, so nothing that was
// said is lost; `leaf` is the end of the branch on show. Plain data, kept as it is by store.js.
import { fenced } from './files.js';

const TITLE_CHARS_MAX = 60;

/**
 * A message: `id`, `parent` (id or null), `role` (user, assistant, tool), `content`. A user's may have `files`
 * (`{ name, text }`); an assistant's `reasoning`, `toolCalls` (`{ id, name, arguments }`), `finish`, `error`, `usage` (so
 * far, while it is written), `firstMs`, `totalMs`, `sentFrom` (id of the first message that was sent for it, if older
 * ones were forgotten), `model`, `answerId` (under which the server keeps it), `seen` (the number of the last chunk that is in
 * it), `began` and `earlier` (tokens and time before it was continued); a tool's has `callId`. A conversation may have a
 * `model`.
 */
export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: '', created: now, updated: now, settings: { ...settings }, messages: [], leaf: null };
}

/** Adds a message after `parent` and shows its branch. */
export function addMessage(conversation, parent, message) {
  const added = { id: newId(), parent, content: '', ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  if (!conversation.title && added.role === 'user') conversation.title = titleOf(added.content || added.files?.[0]?.name || '');
  return added;
}

/** The messages from the first to `id`, by default those on show. */
export function pathTo(conversation, id = conversation.leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let message = byId.get(id); message; message = byId.get(message.parent)) path.push(message);
  return path.reverse();
}

/** Whether an answer is being written, as far as the conversation knows: on this page, on another one, or on none. */
export function isPending(message) {
  return message.role === 'assistant' && Boolean(message.answerId) && !message.finish && !message.error;
}

/** Whether more can be asked for of an answer that has ended too early: stopped, at a limit, broken off. */
export function canContinue({ role, content, finish, toolCalls }) {
  return role === 'assistant' && Boolean(content?.trim()) && !toolCalls && !['stop', 'tool_calls'].includes(finish);
}

/** Removes a message and all that follows it. Returns a function that puts them back. */
export function removeMessage(conversation, id) {
  const { messages, leaf } = conversation;
  const gone = new Set([id]);
  for (const message of messages) if (gone.has(message.parent)) gone.add(message.id); // parents stand before children
  const removed = messages.find((message) => message.id === id);
  conversation.messages = messages.filter((message) => !gone.has(message.id));
  if (gone.has(leaf)) {
    const other = versionsOf(conversation, removed).at(-1);
    conversation.leaf = removed.parent;
    if (other) showBranch(conversation, other.id);
  }
  return () => {
    const now = new Set(conversation.messages.map((message) => message.id));
    const added = conversation.messages.filter((message) => !messages.some((other) => other.id === message.id));
    conversation.messages = [...messages.filter((message) => gone.has(message.id) || now.has(message.id)), ...added];
    conversation.leaf = leaf;
  };
}

/** The versions of one message, oldest first: itself and its branches. */
export function versionsOf(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);
}

/** Shows the branch through `id`, as far as it was last written. */
export function showBranch(conversation, id) {
  let leaf = id;
  for (;;) {
    const next = conversation.messages.findLast((message) => message.parent === leaf);
    if (!next) break;
    leaf = next.id;
  }
  conversation.leaf = leaf;
}

/** What a message says: its text, and its files as fenced blocks. */
export function contentOf({ content, files = [] }) {
  return [content, ...files.map(fenced)].filter(Boolean).join('\n\n');
}

/** Messages as the API takes them. Reasoning stays here: templates want answers only. Nothing was said in an answer that failed at once. */
export function toApi(path, system) {
  const said = path.filter((message) => message.role !== 'assistant' || message.content || message.toolCalls);
  const messages = said.map((message) => {
    if (message.role === 'tool') return { role: 'tool', tool_call_id: message.callId, content: message.content };
    const calls = (message.toolCalls ?? []).map((call) => ({ id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments } }));
    return { role: message.role, content: contentOf(message), ...(calls.length && { tool_calls: calls }) };
  });
  return system ? [{ role: 'system', content: system }, ...messages] : messages;
}

/** The branch on show, to read or to keep. */
export function toMarkdown(conversation) {
  const names = { user: 'You', assistant: 'Assistant', tool: 'Tool' };
  const parts = pathTo(conversation).map((message) => {
    const calls = (message.toolCalls ?? []).map((call) => `\n\n\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``).join('');
    return `## ${names[message.role]}\n\n${contentOf(message)}${calls}`;
  });
  const system = conversation.settings.system ? [`## System\n\n${conversation.settings.system}`] : [];
  return [`# ${conversation.title || 'Conversation'}`, ...system, ...parts].join('\n\n') + '\n';
}

function titleOf(text) {
  const line = text.trim().split('\n', 1)[0];
  return line.length > TITLE_CHARS_MAX ? `${line.slice(0, TITLE_CHARS_MAX - 1).trimEnd()}…` : line;
}

/** crypto.randomUUID exists only on secure origins, and a LAN address over HTTP is none. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, '0')).join('');
}
