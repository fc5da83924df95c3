//! `RemoteServer`: a chat's model on a server with OpenAI's API. What the server sends is bounded, and waited for within
//! limits; each request can be ended at once.

mod event_stream;
mod wire;

use std::io::{self, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use engine::Timings;
use text::{Delta, ReplyFormat, ReplyParser, Tool};
use ureq::Agent;
use ureq::http::{Response, Uri};

use super::answerer::{AnswerEnd, AnswerPart, EndReason, Question};
use super::conversation::messages;
use crate::interrupt::InterruptGuard;
use crate::terminal;
use event_stream::EventStream;
use wire::{Chunk, ChunkUsage, ModelList, StreamOptions, TemplateVariables, WireRequest};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may send nothing: it may be loading a model, or reading a long prompt.
const SILENCE_MAX: Duration = Duration::from_secs(300);
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
const LIST_BYTES_MAX: u64 = 4 << 20;
const LIST_MODELS_MAX: usize = 10_000;
const ERROR_BYTES_MAX: u64 = 64 << 10;
/// The longest answer. No context has as much.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Events that wait to be printed.
const EVENTS_MAX: usize = 64;
/// How often a key that stops the answer is looked for.
const INTERRUPT_POLL: Duration = Duration::from_millis(20);

/// The tags that a server leaves in the text if it does not know how its model marks reasoning.
const REASONING_TAGS: &str = "<think></think>";

/// Where a server is, and the key for it.
#[derive(Clone, Debug)]
pub struct ServerAddress {
    /// Up to and including `/v1`.
    base: String,
    key: Option<String>,
    silence_max: Duration,
}

pub struct RemoteServer {
    address: ServerAddress,
    model: String,
    models: Vec<String>,
}

/// What the thread of a request tells.
enum Event {
    Part(AnswerPart),
    Ended(Result<StreamEnd>),
}

/// How a stream ended.
struct StreamEnd {
    is_cut_off: bool,
    usage: Option<ChunkUsage>,
    sent: Instant,
    /// When the first and the last part came.
    parts_at: Option<(Instant, Instant)>,
}

impl ServerAddress {
    pub fn new(url: &str, key: Option<String>) -> Self {
        let base = url.strip_suffix("/v1").unwrap_or(url);
        Self { base: format!("{base}/v1"), key, silence_max: SILENCE_MAX }
    }

    fn agent(&self) -> Agent {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(self.silence_max))
            .timeout_per_read(Some(self.silence_max))
            .user_agent(concat!("consort/", env!("CARGO_PKG_VERSION")));
        if self.base.starts_with("http://") {
            // A server on this machine or in this network is not behind a proxy.
            config = config.proxy(None);
        }
        config.build().new_agent()
    }

    /// The models that the server lists. `None` if it lists none at all.
    fn models(&self) -> Result<Option<Vec<String>>> {
        let mut request =
            self.agent().get(format!("{}/models", self.base)).config().timeout_global(Some(LIST_TIMEOUT)).build();
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let response = request.call().map_err(|error| self.unreachable(error))?;
        if response.status().as_u16() == 404 {
            return Ok(None);
        }
        let response = self.checked(response)?;
        let body = self.body(response, LIST_BYTES_MAX)?;
        let not_a_list =
            || format!("{} is no server with OpenAI's API: its list of models is something else", self.base);
        let list: ModelList = serde_json::from_slice(&body).with_context(not_a_list)?;
        Ok(Some(list.data.into_iter().take(LIST_MODELS_MAX).map(|model| model.id).collect()))
    }

    /// Sends a request, and gives `show` the parts of the answer. Ends early if `show` returns false.
    fn stream(&self, agent: &Agent, body: &[u8], mut show: impl FnMut(AnswerPart) -> bool) -> Result<StreamEnd> {
        let mut request = agent
            .post(format!("{}/chat/completions", self.base))
            .header("Content-Type", "application/json")
            .header("Accept", "text/event-stream");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let sent = Instant::now();
        let response = self.checked(request.send(body).map_err(|error| self.unreachable(error))?)?;
        let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        ensure!(
            kind.starts_with("text/event-stream"),
            "{} answered with {} instead of a stream of events",
            self.base,
            if kind.is_empty() { "something".to_owned() } else { wire::shortened(kind) }
        );
        let mut events = EventStream::new(BufReader::new(response.into_body().into_reader()));
        let format = ReplyFormat::detect(REASONING_TAGS, false);
        let no_tools: [Tool; 0] = [];
        let mut parser = ReplyParser::new(&format, no_tools);
        let mut end = StreamEnd { is_cut_off: false, usage: None, sent, parts_at: None };
        let (mut bytes, mut is_finished) = (0, false);
        loop {
            let data = match events.next() {
                Ok(Some(data)) => data,
                Ok(None) if is_finished => break,
                Ok(None) => bail!("{} closed the connection in the middle of the answer", self.base),
                Err(event_stream::StreamError::Io(error)) => return Err(self.broken(error)),
                Err(error) => bail!("{} sent no answer: {error}", self.base),
            };
            if data.trim() == "[DONE]" {
                break;
            }
            let chunk: Chunk = serde_json::from_str(&data)
                .map_err(|_| anyhow!("{} sent no answer, but: {}", self.base, wire::shortened(&data)))?;
            if let Some(error) = &chunk.error {
                let message = wire::message_of(error).unwrap_or_else(|| wire::shortened(&error.to_string()));
                bail!("{} ended the answer: {message}", self.base);
            }
            end.usage = chunk.usage.or(end.usage);
            let Some(choice) = chunk.choices.into_iter().next() else { continue };
            if let Some(delta) = choice.delta {
                let reasoning = delta.reasoning_content.or(delta.reasoning).filter(|text| !text.is_empty());
                let content = delta.content.filter(|text| !text.is_empty());
                bytes += reasoning.as_ref().map_or(0, String::len) + content.as_ref().map_or(0, String::len);
                ensure!(bytes <= ANSWER_BYTES_MAX, "{} sent an answer without an end", self.base);
                if reasoning.is_some() || content.is_some() {
                    let now = Instant::now();
                    end.parts_at = Some((end.parts_at.map_or(now, |(first, _)| first), now));
                }
                let text = content.map(|text| parser.push(&text)).unwrap_or_default();
                let parts = reasoning.map(AnswerPart::Reasoning).into_iter().chain(text.into_iter().filter_map(part));
                if !parts.into_iter().all(&mut show) {
                    return Ok(end);
                }
            }
            if let Some(reason) = choice.finish_reason {
                is_finished = true;
                end.is_cut_off = reason == "length";
            }
        }
        parser.finish().into_iter().filter_map(part).all(show);
        Ok(end)
    }

    /// A response that is no error.
    fn checked(&self, response: Response<ureq::Body>) -> Result<Response<ureq::Body>> {
        let status = response.status().as_u16();
        match status {
            200 => return Ok(response),
            401 | 403 if self.key.is_none() => {
                bail!("{} wants a key: give it by --api-key or CONSORT_API_KEY", self.base)
            }
            401 | 403 => bail!("{} does not accept this key", self.base),
            _ => {}
        }
        let body = self.body(response, ERROR_BYTES_MAX).unwrap_or_default();
        match wire::error_message(&body) {
            Some(message) => bail!("{} answered: {message}", self.base),
            None if status == 404 => bail!("{} has no chat API (HTTP 404)", self.base),
            None => bail!("{} answered with HTTP {status}", self.base),
        }
    }

    fn body(&self, response: Response<ureq::Body>, bytes_max: u64) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        let mut reader = response.into_body().into_reader().take(bytes_max + 1);
        reader.read_to_end(&mut body).map_err(|error| self.broken(error))?;
        ensure!(body.len() as u64 <= bytes_max, "{} sent a reply without an end", self.base);
        Ok(body)
    }

    fn unreachable(&self, error: ureq::Error) -> anyhow::Error {
        match error {
            ureq::Error::Timeout(_) => anyhow!("no server answers at {} in time", self.base),
            ureq::Error::HostNotFound => anyhow!("no server answers at {}: there is no such host", self.base),
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                anyhow!("no server answers at {}: connection refused", self.base)
            }
            error => anyhow!("no server answers at {}: {error}", self.base),
        }
    }

    /// An error after the reply began.
    fn broken(&self, error: io::Error) -> anyhow::Error {
        match ureq::Error::from(error) {
            ureq::Error::Timeout(_) => anyhow!("{} sent nothing for {} s", self.base, self.silence_max.as_secs_f32()),
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                anyhow!("{} closed the connection in the middle of the answer", self.base)
            }
            error => anyhow!("the connection to {} broke: {error}", self.base),
        }
    }
}

impl RemoteServer {
    /// Asks the server for its models, and takes the first one unless one is named.
    pub fn connect(address: ServerAddress, model: Option<String>) -> Result<Self> {
        let models = match (address.models(), &model) {
            (Ok(models), _) => models.unwrap_or_default(),
            // It may have no list. The first message finds out whether it answers.
            (Err(_), Some(_)) => Vec::new(),
            (Err(error), None) => return Err(error),
        };
        let model = model.or_else(|| models.first().cloned());
        let model = model.with_context(|| format!("{} lists no model: name one by --model", address.base))?;
        Ok(Self { address, model, models })
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// The models that the server lists.
    pub fn models(&self) -> &[String] {
        &self.models
    }

    pub fn set_model(&mut self, model: &str) -> Result<()> {
        if !self.models.is_empty() && !self.models.iter().any(|known| known == model) {
            terminal::note(&format!("({} does not list {model}: it may refuse it)", self.address.base));
        }
        self.model = model.to_owned();
        Ok(())
    }

    pub fn answer(
        &mut self,
        question: Question<'_>,
        interrupt: &InterruptGuard,
        show: &mut dyn FnMut(AnswerPart) -> Result<()>,
    ) -> Result<AnswerEnd> {
        let sampling = question.sampling;
        let request = WireRequest {
            model: &self.model,
            messages: messages(question.system, question.turns),
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            seed: sampling.seed,
            max_tokens: sampling.max_tokens,
            chat_template_kwargs: question.thinks.map(|enable_thinking| TemplateVariables { enable_thinking }),
        };
        let body = serde_json::to_vec(&request).context("write the request")?;
        let (agent, address) = (self.address.agent(), self.address.clone());
        let (sender, events) = sync_channel(EVENTS_MAX);
        let worker = {
            let agent = agent.clone();
            move || request_answer(&address, &agent, &body, &sender)
        };
        thread::Builder::new()
            .name("request".to_owned())
            .spawn(worker)
            .map_err(|error| anyhow!("start a thread: {error}"))?;
        let answer = receive(&events, interrupt, show);
        // Ends the request if it still runs: the server need not go on.
        agent.shutdown();
        let Some(end) = answer? else {
            return Ok(AnswerEnd { reason: EndReason::Interrupted, forgotten: 0, timings: None });
        };
        let reason = match (end.is_cut_off, sampling.max_tokens) {
            (false, _) => EndReason::Complete,
            (true, Some(max)) => EndReason::CutOff(format!("max_tokens is {max}")),
            (true, None) => EndReason::CutOff("the server's limit is reached".to_owned()),
        };
        Ok(AnswerEnd { reason, forgotten: 0, timings: end.timings() })
    }
}

impl StreamEnd {
    /// The speed as it was seen here.
    fn timings(&self) -> Option<Timings> {
        let (usage, (first, last)) = (self.usage?, self.parts_at?);
        Some(Timings {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or_default(),
            generated_tokens: usage.completion_tokens,
            queued: Duration::ZERO,
            prefill: first - self.sent,
            decode: last - first,
        })
    }
}

/// The thread of one request.
fn request_answer(address: &ServerAddress, agent: &Agent, body: &[u8], events: &SyncSender<Event>) {
    let end = address.stream(agent, body, |part| events.send(Event::Part(part)).is_ok());
    // Nobody waits for an answer that was interrupted.
    let _ = events.send(Event::Ended(end));
}

/// Shows the parts of an answer until it ends. `None` if it was interrupted.
fn receive(
    events: &Receiver<Event>,
    interrupt: &InterruptGuard,
    show: &mut dyn FnMut(AnswerPart) -> Result<()>,
) -> Result<Option<StreamEnd>> {
    loop {
        let event = events.recv_timeout(INTERRUPT_POLL);
        if interrupt.is_interrupted() {
            return Ok(None);
        }
        match event {
            Ok(Event::Part(part)) => show(part)?,
            Ok(Event::Ended(end)) => return end.map(Some),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the thread of the request ended"),
        }
    }
}

fn part(delta: Delta) -> Option<AnswerPart> {
    match delta {
        Delta::Text(text) => Some(AnswerPart::Text(text)),
        Delta::Reasoning(text) => Some(AnswerPart::Reasoning(text)),
        // There are no tools.
        Delta::ToolCall { .. } | Delta::Arguments { .. } => None,
    }
}

/// Parses the address of a server: scheme and host, perhaps a port and a path before `/v1`.
pub fn server_url(text: &str) -> Result<String, String> {
    let wrong = || "write it as http://HOST:PORT or https://HOST:PORT".to_owned();
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let is_known = matches!(uri.scheme_str(), Some("http" | "https"));
    let is_plain = is_known && uri.host().is_some_and(|host| !host.is_empty()) && uri.query().is_none();
    if is_plain { Ok(text.trim_end_matches('/').to_owned()) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, Write};
    use std::net::{Shutdown, TcpListener};

    use super::*;

    /// The address of a server that sends this to one request and closes the connection, unless it `stalls`.
    fn server(reply: String, stalls: bool) -> ServerAddress {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            // The client may leave before the end.
            let _ = reader.get_mut().write_all(reply.as_bytes());
            if !stalls {
                let _ = reader.get_ref().shutdown(Shutdown::Write);
            }
            // To close the connection before all of the request was read would discard what was sent.
            let _ = io::copy(&mut reader, &mut io::sink());
        });
        ServerAddress { silence_max: Duration::from_millis(200), ..ServerAddress::new(&url, None) }
    }

    fn events(events: &str) -> String {
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{events}")
    }

    fn stream(address: &ServerAddress) -> (Vec<AnswerPart>, Result<StreamEnd>) {
        let mut parts = Vec::new();
        let end = address.stream(&address.agent(), b"{}", |part| {
            parts.push(part);
            true
        });
        (parts, end)
    }

    #[track_caller]
    fn check_refused(reply: String, stalls: bool, why: &str) {
        let address = server(reply, stalls);
        let Err(error) = stream(&address).1 else { panic!("it is an answer") };
        let told = format!("{error:#}");
        assert!(told.contains(why) && told.contains(&address.base) && !told.contains('\n'), "{told}");
        assert!(!error.is::<io::Error>(), "this would end the chat");
    }

    fn chunk(delta: &str, finish: &str) -> String {
        format!("data: {{\"choices\": [{{\"delta\": {delta}, \"finish_reason\": {finish}}}]}}\n\n")
    }

    #[test]
    fn text_and_reasoning_come_as_parts() {
        let (text, reasoning) =
            (|text: &str| AnswerPart::Text(text.into()), |text: &str| AnswerPart::Reasoning(text.into()));
        let all = [
            ": wait\n\n".to_owned(),
            chunk(r#"{"role": "assistant", "content": null}"#, "null"),
            chunk(r#"{"reasoning_content": "hm"}"#, "null"),
            chunk(r#"{"content": "a"}"#, "null"),
            chunk("{}", "\"length\""),
            "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 2}}\n\ndata: [DONE]\n\n"
                .to_owned(),
        ];
        let (parts, end) = stream(&server(events(&all.concat()), false));
        let end = end.unwrap();
        assert_eq!(parts, [reasoning("hm"), text("a")]);
        let timings = end.timings().unwrap();
        assert_eq!((end.is_cut_off, timings.prompt_tokens, timings.generated_tokens), (true, 3, 2));
        let tagged =
            [chunk(r#"{"content": "<think>hm</th"}"#, "null"), chunk(r#"{"content": "ink>\n\na"}"#, "\"stop\"")];
        let (parts, end) = stream(&server(events(&tagged.concat()), false));
        assert!(!end.unwrap().is_cut_off, "a stream may end without [DONE]");
        assert_eq!(parts, [reasoning("hm"), text("a")]);
    }

    #[test]
    fn a_server_that_lies_or_stalls_gets_one_sentence() {
        let begun = chunk(r#"{"content": "a"}"#, "null");
        check_refused(events(&begun), false, "closed the connection in the middle");
        check_refused(events(&begun), true, "sent nothing for 0.2 s");
        check_refused(String::new(), true, "no server answers");
        check_refused(events("data: <garbage>\n\n"), false, "sent no answer, but: <garbage>");
        check_refused(events("data: [1]\n\n"), false, "sent no answer");
        check_refused(events("data: {\"error\": {\"message\": \"out of\\nmemory\"}}\n\n"), false, "out of memory");
        check_refused(events(&"a".repeat(2 << 20)), false, "longer than 1024 KiB");
        check_refused(
            "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1\r\n\r\nx".into(),
            false,
            "text/html",
        );
        check_refused("garbage\r\n\r\n".into(), false, "no server answers");
        let chunked =
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata";
        check_refused(chunked.into(), false, "");
    }

    #[test]
    fn an_error_of_the_server_is_told_as_it_says() {
        let reply = |status: &str, body: &str| {
            format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
        };
        check_refused(reply("400 Bad", r#"{"error": {"message": "too long"}}"#), false, "answered: too long");
        check_refused(reply("401 No", ""), false, "wants a key");
        check_refused(reply("404 No", "<html>"), false, "has no chat API");
        check_refused(reply("503 Busy", ""), false, "HTTP 503");
        check_refused(reply("302 Found", ""), false, "HTTP 302");
    }

    #[test]
    fn a_model_is_chosen_from_the_list() {
        let reply = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let connect = |body: &str, model: Option<&str>| {
            RemoteServer::connect(server(reply(body), false), model.map(str::to_owned)).map(|server| server.model)
        };
        let list = r#"{"data": [{"id": "a"}, {"id": "b"}]}"#;
        assert_eq!(connect(list, None).unwrap(), "a");
        assert_eq!(connect(list, Some("b")).unwrap(), "b");
        assert_eq!(connect("nonsense", Some("b")).unwrap(), "b");
        assert!(connect(r#"{"data": []}"#, None).unwrap_err().to_string().contains("--model"));
        assert!(connect("nonsense", None).unwrap_err().to_string().contains("something else"));
    }

    #[test]
    fn an_address_may_end_with_v1() {
        let base = |url: &str| ServerAddress::new(&server_url(url).unwrap(), None).base;
        assert_eq!(base("http://127.0.0.1:8000/"), "http://127.0.0.1:8000/v1");
        assert_eq!(base("https://a.example/llm/v1/"), "https://a.example/llm/v1");
        for text in ["", "localhost:8000", "ftp://x", "http://", "http://a b", "http://a/?x=1"] {
            assert!(server_url(text).is_err(), "{text}");
        }
    }
}
