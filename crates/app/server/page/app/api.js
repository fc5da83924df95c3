// The server's HTTP API as this page uses it. Every failure becomes an ApiError that can be shown as it is.
import { recall, remember } from './memory.js';
import { events } from './sse.js';

/** `status`: of HTTP, 0 without one. `code`: the server's name for the failure, such as `model_not_found`. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

export const apiKey = () => recall('key', '');
export const setApiKey = (key) => remember('key', key);

/** GET /status of a model, or of the one that is served, with the key that is kept or another one. */
export async function serverStatus(model = null, key = apiKey()) {
  return (await call(`status${query({ model })}`, {}, key)).json();
}

/** GET /v1/models: what the server has. */
export async function models() {
  return (await (await call('v1/models')).json()).data ?? [];
}

/** GET /v1/cluster. */
export async function clusterState(model = null) {
  return (await call(`v1/cluster${query({ model })}`)).json();
}

/** `/v1/cluster/invitation`: POST begins one, GET tells of it, DELETE ends it. */
export async function invitation(method) {
  return (await call('v1/cluster/invitation', { method })).json().catch(() => null);
}

/** POST /tokenize: how many tokens the prompt of a request for a chat completion has. */
export async function promptTokens({ model, messages, tools, add_generation_prompt, continue_final_message }, signal) {
  const response = await post('tokenize', { model, messages, tools, add_generation_prompt, continue_final_message }, signal);
  return (await response.json()).count;
}

/**
 * POST /v1/chat/completions: the chunks of a streamed answer, each as `{ chunk, number }`. Ends only after the server said that
 * it ended. The server keeps the answer under the request's `answer_id`.
 */
export async function* streamChat(body, signal) {
  yield* chunks(await post('v1/chat/completions', { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }, signal), signal);
}

/** The same of an answer that the server keeps, after the chunk with the number `after`, or from the first on. */
export async function* resumeChat(id, after, signal) {
  const path = `v1/answers/${encodeURIComponent(id)}${query({ starting_after: after >= 0 ? after : null })}`;
  yield* chunks(await call(path, { signal }), signal);
}

/** Ends an answer that the server keeps. */
export async function cancelChat(id) {
  await call(`v1/answers/${encodeURIComponent(id)}/cancel`, { method: 'POST', keepalive: true });
}

async function* chunks(response, signal) {
  try {
    for await (const { data, number } of events(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? 'the server failed', { status: Number(chunk.error.code) || 0, code: chunk.error.code ?? null });
      yield { chunk, number };
    }
  } catch (error) {
    throw signal.aborted || error instanceof ApiError ? error : new ApiError(`the answer broke off: ${error.message}`, { code: 'broken_off' });
  }
  throw new ApiError('the connection closed before the answer ended', { code: 'broken_off' });
}

/** `?name=value` of what is not null. */
function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? `?${new URLSearchParams(given)}` : '';
}

function post(path, body, signal) {
  return call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), signal });
}

async function call(path, options = {}, key = apiKey()) {
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store' });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError('the server cannot be reached');
  }
  if (!response.ok) throw await failure(response, key);
  return response;
}

async function failure(response, key) {
  const { status, statusText } = response;
  const retryAfter = Number.parseInt(response.headers.get('retry-after'), 10);
  const retryAfterS = Number.isFinite(retryAfter) ? retryAfter : null;
  if (status === 401 && key) return new ApiError('the server does not accept this API key', { status });
  try {
    const { error } = await response.json();
    if (error?.message) return new ApiError(error.message, { status, code: error.code ?? null, retryAfterS });
  } catch {
    // Not our envelope: a proxy in between, most likely.
  }
  return new ApiError(`the server answered ${status} ${statusText}`.trim(), { status, retryAfterS });
}
