// From a conversation to the message that answers it. No elements here.
import { ApiError, streamChat } from './api.js';
import { fittingStart, nextTurn, requestFor } from './context.js';

/**
 * Writes the answer to `path` into `message`, calling `onChange` after every chunk. Asks once more if the server has another
 * model by now, and forgets the oldest turns of a conversation that is too long for it: see `message.sentFrom`. Never throws:
 * see `message.error`.
 */
export async function writeAnswer(message, path, settings, server, signal, onChange) {
  const began = performance.now();
  let reloaded = false;
  let start = null;
  for (;;) {
    try {
      const { model } = server;
      start ??= await fittingStart(path, settings, model, server.status?.context, signal);
      if (start > 0) message.sentFrom = path[start].id;
      onChange();
      await writeChunks(message, requestFor(path, start, settings, model), signal, began, onChange);
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
    message.totalMs = performance.now() - began;
    // Not the limit that was set, so the context's.
    if (message.finish === 'length' && !(message.usage?.generated >= settings.max_tokens)) message.finish = 'context';
    return;
  }
}

async function writeChunks(message, body, signal, began, onChange) {
  for await (const chunk of streamChat(body, signal)) {
    addChunk(message, chunk);
    if (message.content || message.reasoning || message.toolCalls) message.firstMs ??= performance.now() - began;
    onChange();
  }
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
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function addToolCall(message, { index = 0, id, function: part = {} }) {
  message.toolCalls ??= [];
  const call = (message.toolCalls[index] ??= { id: '', name: '', arguments: '' });
  if (id) call.id = id;
  if (part.name) call.name += part.name;
  if (part.arguments) call.arguments += part.arguments;
}
