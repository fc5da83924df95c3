// Conversations from a file that this page or another one exported as JSON. What is in the file is checked: only what a
// conversation consists of is taken over.
import { newId } from './conversation.js';
import { knownSettings } from './settings.js';

export const IMPORT_BYTES_MAX = 32 << 20;

const ROLES = ['user', 'assistant', 'tool'];

/** The conversations in the text of a file: one, or a list of them. Throws an Error that says what is wrong. */
export function conversationsFrom(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error('the file is not JSON');
  }
  const list = Array.isArray(value) ? value : [value];
  if (!list.length) throw new Error('the file has no conversation');
  return list.map(conversationFrom);
}

function conversationFrom(value) {
  if (!Array.isArray(value?.messages)) throw new Error('the file has no exported conversation');
  const messages = [];
  const ids = new Set();
  // A parent stands before its children in what is exported, so a message cannot be its own ancestor.
  for (const message of value.messages) {
    const { id, parent = null, role, content } = message ?? {};
    const sound = isText(id) && !ids.has(id) && ROLES.includes(role) && isText(content) && (parent === null || ids.has(parent));
    if (!sound) throw new Error('a message in the file is damaged');
    ids.add(id);
    messages.push({ id, parent, role, content, ...extrasOf(message) });
  }
  const now = Date.now();
  const time = (at) => (Number.isFinite(at) ? at : now);
  return {
    id: newId(), // it does not replace a conversation that is here
    title: isText(value.title) ? value.title.slice(0, 120) : '',
    created: time(value.created),
    updated: time(value.updated),
    settings: knownSettings(value.settings),
    ...(isText(value.model) && { model: value.model.slice(0, 500) }),
    messages,
    leaf: ids.has(value.leaf) ? value.leaf : messages.at(-1)?.id ?? null,
  };
}

function extrasOf({ reasoning, toolCalls, callId, files, finish, usage, firstMs, totalMs, sentFrom, model, edited, earlier }) {
  const extras = {};
  if (isText(reasoning)) extras.reasoning = reasoning;
  if (isText(callId)) extras.callId = callId;
  if (isText(finish)) extras.finish = finish;
  if (isText(sentFrom)) extras.sentFrom = sentFrom;
  if (isText(model)) extras.model = model;
  if (edited === true) extras.edited = true;
  if ([earlier?.tokens, earlier?.ms].every(Number.isFinite)) extras.earlier = { tokens: earlier.tokens, ms: earlier.ms };
  if (Number.isFinite(firstMs)) extras.firstMs = firstMs;
  if (Number.isFinite(totalMs)) extras.totalMs = totalMs;
  if ([usage?.prompt, usage?.generated].every(Number.isFinite)) {
    extras.usage = { prompt: usage.prompt, cached: Number.isFinite(usage.cached) ? usage.cached : 0, generated: usage.generated };
  }
  const calls = recordsOf(toolCalls, ['id', 'name', 'arguments']);
  if (calls.length) extras.toolCalls = calls;
  const texts = recordsOf(files, ['name', 'text']);
  if (texts.length) extras.files = texts;
  return extras;
}

/** The members of a list that have these texts, with nothing else. */
function recordsOf(list, names) {
  if (!Array.isArray(list)) return [];
  const sound = list.filter((entry) => names.every((name) => isText(entry?.[name])));
  return sound.map((entry) => Object.fromEntries(names.map((name) => [name, entry[name]])));
}

function isText(value) {
  return typeof value === 'string';
}
