// The server's HTTP API as this page uses it. Every failure becomes an ApiError that can be shown as it is.
import { recall, remember } from './memory.js';
import { eventData } from './sse.js';

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

/** GET /status, with the key that is kept or another one. */
export async function serverStatus(key = apiKey()) {
  return (await call('status', {}, key)).json();
}

/** GET /v1/cluster. */
export async function clusterState() {
  return (await call('v1/cluster')).json();
}

/** POST /tokenize: how many tokens the prompt of a request for a chat completion has. */
export async function promptTokens({ model, messages, tools }, signal) {
  const response = await post('tokenize', { model, messages, tools }, signal);
  return (await response.json()).count;
}

/** POST /v1/chat/completions: the chunks of a streamed answer. Ends only after the server said that it ended. */
export async function* streamChat(body, signal) {
  const response = await post('v1/chat/completions', { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }, signal);
  try {
    for await (const data of eventData(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? 'the server failed', { status: Number(chunk.error.code) || 0 });
      yield chunk;
    }
  } catch (error) {
    throw signal.aborted || error instanceof ApiError ? error : new ApiError(`the answer broke off: ${error.message}`);
  }
  throw new ApiError('the connection closed before the answer ended');
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
