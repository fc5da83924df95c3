// The model's context: which messages of a conversation are sent, and how full the context is. When a conversation grows
// too long, its oldest turns are forgotten, as in `consort chat`. They stay on the page.
import { ApiError, promptTokens } from './api.js';
import { contentOf, toApi } from './conversation.js';
import { requestOf } from './settings.js';

/** One part in this many of the context is left to the answer. */
const ANSWER_PART = 4;
/** At most this many tokens stand around a message in a prompt. */
const AROUND_MAX = 64;

/** The request for what follows `path`, of which the messages from `start` on are sent. */
export function requestFor(path, start, settings, model) {
  const continues = path.at(-1)?.role === 'assistant' && { add_generation_prompt: false, continue_final_message: true };
  return { model, messages: toApi(path.slice(start), settings.system), ...requestOf(settings), ...continues };
}

/** Index of the first message of `path` that is still sent: answers say from where on they were given the conversation. */
export function startOf(path) {
  const told = path.findLast((message) => message.sentFrom);
  return Math.max(path.findIndex((message) => message.id === told?.sentFrom), 0);
}

/** Index at which the turn after the one at `start` begins, or -1: the last turn is always sent. */
export function nextTurn(path, start) {
  return path.findIndex((message, i) => i > start && message.role === 'user');
}

/**
 * Where to start so that the conversation fits into `context` tokens with room for an answer. The server counts, but only
 * if the conversation may be too long.
 */
export async function fittingStart(path, settings, model, context, signal) {
  const first = startOf(path);
  const room = context - Math.min(Math.floor(context / ANSWER_PART), settings.max_tokens ?? context);
  if (!context || tokensMax(path, first, settings) <= room) return first;
  const fits = async (start) => {
    try {
      return (await promptTokens(requestFor(path, start, settings, model), signal)) <= room;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return error.code !== 'context_length_exceeded'; // whatever else is wrong, the answer will say
    }
  };
  if (await fits(first)) return first;
  const starts = path.flatMap((message, i) => (i > first && message.role === 'user' ? [i] : []));
  if (!starts.length) return first;
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle])) high = middle;
    else low = middle + 1;
  }
  return starts[low];
}

/** Tokens of the conversation when its last counted answer ended, or null if none was. */
export function tokensUsed(path) {
  const counted = path.findLast((message) => message.usage);
  return counted ? counted.usage.prompt + counted.usage.generated : null;
}

/**
 * No prompt has more tokens than this: those that were counted, and one for each byte that came after. System prompt and
 * tools may have changed since.
 */
function tokensMax(path, start, settings) {
  const counted = path.findLastIndex((message, i) => i >= start && message.usage);
  const messages = path.slice(counted < 0 ? start : counted + 1).map(contentOf);
  const added = [...messages, settings.system ?? '', settings.tools ?? ''];
  const bytes = new TextEncoder().encode(added.join('')).length;
  return (counted < 0 ? 0 : tokensUsed(path.slice(0, counted + 1))) + bytes + AROUND_MAX * (added.length + 1);
}
