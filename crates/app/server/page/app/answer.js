// From a conversation to the message that answers it. No elements here.
import { ApiError, resumeChat, streamChat } from './api.js';
import { fittingStart, nextTurn, requestFor } from './context.js';
import { newId } from './conversation.js';

/** A connection that broke off is tried again so often, after this time. */
const RESUMES_MAX = 5;
const RESUME_MS = 1000;
/** An answer that is so young may not have reached the server yet: another page has just asked for it. */
const YOUNG_MS = 10_000;

/**
 * Writes the answer to `path` into `message`, calling `onChange` after every chunk, and `onAsk` before each request, which it
 * awaits. If `message` is the last of `path`, it is continued. Asks once more if the server has another model by now, and
 * forgets the oldest turns of a conversation that is too long for it: see `message.sentFrom`. Never throws: see
 * `message.error`.
 */
export async function writeAnswer(message, path, settings, server, model, signal, { onChange, onAsk }) {
  message.began = Date.now();
  let reloaded = false;
  let start = null;
  for (;;) {
    try {
      const named = model() ?? server.model;
      start ??= await fittingStart(path, settings, named, server.status?.context, signal);
      if (start > 0) message.sentFrom = path[start].id;
      const request = requestFor(path, start, settings, named); // before the message changes
      const before = message.content;
      message.answerId = newId();
      message.seen = -1;
      message.model = named;
      await onAsk();
      onChange();
      await readWhole(message, streamChat({ ...request, answer_id: message.answerId }, signal), signal, () => {
        if (message.content !== before || message.reasoning || message.toolCalls) message.firstMs ??= Date.now() - message.began;
        onChange();
      });
    } catch (error) {
      if (!signal.aborted && error.code === 'model_not_found' && !reloaded) {
        reloaded = true;
        await server.reload();
        continue;
      }
      if (!signal.aborted && error.code === 'context_length_exceeded' && nextTurn(path, start) > 0) {
        start = nextTurn(path, start);
        continue;
      }
      fail(message, error, signal);
    }
    end(message, settings);
    message.totalMs = Date.now() - message.began;
    return;
  }
}

/** Goes on reading an answer that the server keeps. Returns `read`, or `gone` if it keeps it no more, or `locked` without a key. */
export async function resumeAnswer(message, settings, signal, onChange) {
  for (;;) {
    try {
      await readWhole(message, resumeChat(message.answerId, message.seen ?? -1, signal), signal, onChange);
    } catch (error) {
      const isYoung = !message.content && !message.reasoning && Date.now() - (message.began ?? 0) < YOUNG_MS;
      if (error.status === 404 && isYoung && !signal.aborted) {
        await pause(signal);
        if (!signal.aborted) continue;
      }
      if (error.status === 404) return 'gone';
      if (!signal.aborted && error.status === 401) return 'locked';
      fail(message, error, signal);
    }
    end(message, settings);
    return 'read';
  }
}

/** Reads chunks to their end, also if the connection breaks off meanwhile and the server keeps the answer. */
async function readWhole(message, chunks, signal, onChange) {
  let broken = null;
  for (let tries = 0; ; tries += 1) {
    try {
      for await (const { chunk, number } of chunks) {
        tries = 0;
        addChunk(message, chunk);
        if (number !== null) message.seen = number;
        onChange();
      }
      return;
    } catch (error) {
      if (broken && error.status === 404) throw broken;
      const isLost = error.code === 'broken_off' || (broken && error.status === 0);
      if (signal.aborted || !isLost || tries >= RESUMES_MAX || message.seen < 0) throw broken ?? error;
      broken = error;
    }
    if (tries > 0) await pause(signal);
    chunks = resumeChat(message.answerId, message.seen, signal);
  }
}

function pause(signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, RESUME_MS);
    signal.addEventListener('abort', () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}

function end(message, settings) {
  // Not the limit that was set, so the context's.
  if (message.finish === 'length' && !(message.usage?.generated >= settings.max_tokens)) message.finish = 'context';
}

function fail(message, error, signal) {
  if (signal.aborted) {
    message.finish = 'stopped';
    return;
  }
  const { message: text, status = 0, code = null, retryAfterS = null } = error;
  message.error = { text, status, code, retryAfterS };
  if (!(error instanceof ApiError)) console.error(error);
}

function addChunk(message, { choices = [], usage }) {
  if (usage) message.usage = { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0, generated: usage.completion_tokens };
  const [choice] = choices;
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
  if (content) message.content += content;
  for (const call of calls ?? []) addToolCall(message, call);
  if (choice.finish_reason) message.finish = choice.finish_reason === 'cancelled' ? 'stopped' : choice.finish_reason;
}

function addToolCall(message, { index = 0, id, function: part = {} }) {
  message.toolCalls ??= [];
  const call = (message.toolCalls[index] ??= { id: '', name: '', arguments: '' });
  if (id) call.id = id;
  if (part.name) call.name += part.name;
  if (part.arguments) call.arguments += part.arguments;
}
