//! Generations: from a [`GenerationRequest`] to a stream of events, for all APIs.
//!
//! [`Generation::start`] encodes the prompt, submits it to the engine and waits until the engine has accepted it, so that a
//! refused request still gets an HTTP status. Then [`Generation::next`] returns events as the model generates. Dropping the
//! generation cancels the requests that still run.

mod compiling;
mod constraint;
mod decoder;
mod embed;
mod output;
mod prompt;
mod request;
mod sink;
mod truncation;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::{EventKind, FinishReason, Sampled};
use text::Delta;
use tokio::sync::mpsc::{Receiver, channel};
use tracing::{Span, info};
use types::TokenId;

pub use compiling::CompilerThreads;
pub use embed::{EmbeddingOutput, embed, embed_tokens, normalized};
pub use output::{BlockKind, ChoiceOutput, OutputBlock};
pub use prompt::{chat_tokens, text_tokens, truncated_tokens};
pub use request::{
    CHOICES_MAX, ChatInput, GenerationInput, GenerationRequest, Prompt, PromptEnding, SamplingOverrides,
};

use crate::app::App;
use crate::blocking;
use crate::body_budget::BodyPermit;
use crate::error::ApiError;
use crate::models::ModelUse;
use crate::served_model::ServedModel;
use decoder::ChoiceDecoder;
use prompt::{EncodedRequest, RequestGrammar, error_chain};
use sink::{ChannelSink, EVENTS_MAX};

/// An event of one choice.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// The prompt is computed. Contains its tokens if they or their log probabilities were requested; the first token has no
    /// log probability.
    Prefilled { prompt: Vec<ScoredToken> },
    /// New output that is final, and new tokens if they or their log probabilities were requested. Either may be empty.
    Delta { deltas: Vec<Delta>, tokens: Vec<ScoredToken> },
    /// The last event of this choice.
    Finished(ChoiceFinish),
}

/// A token, with its log probabilities if they were requested.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    pub id: TokenId,
    pub logprobs: Option<engine::Logprobs>,
}

impl From<Sampled> for ScoredToken {
    fn from(Sampled { token, logprobs }: Sampled) -> Self {
        Self { id: token, logprobs }
    }
}

/// Why a choice ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ChoiceFinish {
    /// The model ended the output.
    #[default]
    Stop,
    /// This stop string occurred; it is not part of the output.
    StopString(String),
    /// The token limit or the context is reached.
    Length,
    /// The model waits for the results of its tool calls.
    ToolCalls,
}

/// Tokens of a request, all choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Completion tokens that were reasoning.
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn total_tokens(&self) -> usize {
        self.prompt_tokens + self.completion_tokens
    }
}

/// A generation in progress.
pub struct Generation {
    /// Keeps the model loaded while the generation runs.
    model: ModelUse,
    events: Receiver<(usize, EventKind)>,
    /// Set when the channel of events was full.
    overrun: Arc<AtomicBool>,
    choices: Vec<ChoiceDecoder>,
    choices_per_prompt: usize,
    ready: VecDeque<(usize, GenerationEvent)>,
    accepted: usize,
    finished: usize,
    usage: Usage,
    failed: bool,
    /// Why the last choice ended.
    finish: Option<&'static str>,
    /// The span of the HTTP request. The generation may outlive the handler's call.
    span: Span,
    started: Instant,
    /// When the first and the last token arrived.
    tokens_at: Option<(Instant, Instant)>,
}

impl Generation {
    /// Encodes the prompt and submits it to the engine. `convert` makes the request, and the encoder of the answer, from the body
    /// of one API. It runs on a thread for blocking work, as the encoding does, because a body may be large. A grammar is
    /// compiled on a thread for grammars. The body's permit is released when both are done.
    pub async fn start<E: Send + 'static>(
        app: &App,
        model: ModelUse,
        permit: BodyPermit,
        convert: impl FnOnce(&ServedModel) -> Result<(GenerationRequest, E), ApiError> + Send + 'static,
    ) -> Result<(Self, E), ApiError> {
        let started = Instant::now();
        let tenant = permit.tenant();
        // The permit goes with the work, which may end after its client has gone.
        let (encoded, prepared, encoder, permit) = {
            let model = model.clone();
            let encode = move || {
                let (request, encoder) = convert(&model)?;
                let encoded = EncodedRequest::new(&model, request)?;
                let prepared = encoded.grammar().is_none().then(|| encoded.requests(&model, tenant, None));
                Ok((encoded, prepared, encoder, permit))
            };
            blocking::run(encode).await?
        };
        let choices_per_prompt = encoded.choices();
        let prepared = match encoded.grammar() {
            None => prepared.unwrap_or_default(),
            Some(RequestGrammar { grammar, param }) => {
                let (param, grammar, compiler) = (*param, grammar.clone(), model.clone());
                let compile = move |cancelled: &AtomicBool, time_max: Duration| {
                    compiler.grammars.compile_here(&grammar, cancelled, time_max)
                };
                let compiled = app.compiler_threads().run(compile).await?;
                let matcher = compiled.map_err(|error| ApiError::invalid(param, error_chain(&error)))?;
                let model = model.clone();
                let finish = move || {
                    let _permit = permit;
                    Ok(encoded.requests(&model, tenant, Some(&matcher)))
                };
                blocking::run(finish).await?
            }
        };
        app.metrics().http().prepared(started.elapsed());
        let (sender, events) = channel(EVENTS_MAX);
        let mut generation = Self {
            model,
            events,
            overrun: Arc::default(),
            choices: Vec::with_capacity(prepared.len()),
            choices_per_prompt,
            ready: VecDeque::new(),
            accepted: 0,
            finished: 0,
            usage: Usage::default(),
            failed: true,
            finish: None,
            span: Span::current(),
            started,
            tokens_at: None,
        };
        for (index, (request, mut decoder)) in prepared.into_iter().enumerate() {
            if generation.is_first_of_prompt(index) {
                generation.usage.prompt_tokens += request.prompt.len();
            }
            let timer = generation.model.slot().metrics().request(request.prompt.len());
            let completed = timer.completed();
            let sink = ChannelSink::new(index, sender.clone(), Arc::clone(&generation.overrun), timer);
            decoder.run(generation.model.service.submit(request, Box::new(sink))?, completed);
            generation.choices.push(decoder);
        }
        drop(sender);
        while generation.accepted < generation.choices.len() {
            generation.receive().await?;
        }
        generation.failed = false;
        Ok((generation, encoder))
    }

    /// Tokens so far; final when all choices have finished.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The next event, with the index of its choice. `None` when all choices have finished; nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<(usize, GenerationEvent), ApiError>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(event));
            }
            if self.failed || self.finished == self.choices.len() {
                return None;
            }
            if let Err(error) = self.receive().await {
                self.failed = true;
                return Some(Err(error));
            }
        }
    }

    /// Waits for the end of the generation and returns the output of each choice.
    pub async fn collect(mut self) -> Result<(Vec<ChoiceOutput>, Usage), ApiError> {
        let mut outputs: Vec<_> = self.choices.iter().map(|_| ChoiceOutput::default()).collect();
        while let Some(event) = self.next().await {
            let (choice, event) = event?;
            outputs[choice].push(event);
        }
        Ok((outputs, self.usage()))
    }

    /// Receives one event from the engine, and queues the resulting events.
    async fn receive(&mut self) -> Result<(), ApiError> {
        let Some((index, event)) = self.events.recv().await else {
            let overrun = self.overrun.load(Ordering::Relaxed);
            let reason = if overrun { "the answer was not read for too long" } else { "the engine has ended" };
            return Err(ApiError::internal(reason));
        };
        let first_of_prompt = self.is_first_of_prompt(index);
        let decoder = &mut self.choices[index];
        if decoder.has_ended() {
            return Ok(());
        }
        match event {
            EventKind::Accepted => self.accepted += 1,
            EventKind::Refused(error) => return Err(error.into()),
            EventKind::Prefilled { cached_tokens, prompt_logprobs } => {
                if first_of_prompt {
                    self.usage.cached_tokens += cached_tokens;
                }
                let prompt = decoder.prompt_tokens(prompt_logprobs);
                self.ready.push_back((index, GenerationEvent::Prefilled { prompt }));
            }
            EventKind::Token(sampled) => {
                let (delta, finish) = decoder.token(sampled);
                let now = Instant::now();
                self.tokens_at = Some((self.tokens_at.map_or(now, |(first, _)| first), now));
                self.usage.completion_tokens += 1;
                self.usage.reasoning_tokens += usize::from(decoder.is_reasoning());
                self.ready.extend(delta.map(|delta| (index, delta)));
                self.finish(index, finish);
            }
            EventKind::Finished(finished) => {
                let (finish, end) = match finished.reason {
                    FinishReason::Eos(sampled) => (ChoiceFinish::Stop, Some(sampled)),
                    FinishReason::Complete => (ChoiceFinish::Stop, None),
                    FinishReason::Length | FinishReason::Context => (ChoiceFinish::Length, None),
                    FinishReason::Cancelled => return Err(ApiError::shutting_down()),
                    FinishReason::Failed(failure) => return Err(decoder.failure(failure)),
                };
                let delta = decoder.finish(end);
                self.ready.extend(delta.map(|delta| (index, delta)));
                self.finish(index, Some(finish));
            }
            EventKind::Embedding(_) => return Err(ApiError::internal("an embedding where text was asked for")),
        }
        Ok(())
    }

    fn finish(&mut self, index: usize, finish: Option<ChoiceFinish>) {
        let Some(finish) = finish else { return };
        let decoder = &mut self.choices[index];
        let finish =
            if finish == ChoiceFinish::Stop && decoder.has_called() { ChoiceFinish::ToolCalls } else { finish };
        decoder.stop();
        self.finished += 1;
        self.finish = Some(finish.name());
        self.ready.push_back((index, GenerationEvent::Finished(finish)));
    }

    fn is_first_of_prompt(&self, index: usize) -> bool {
        index.is_multiple_of(self.choices_per_prompt)
    }
}

impl Drop for Generation {
    /// Logs one line for each generation, however it ended.
    fn drop(&mut self) {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = self.usage;
        let ended = match self.finish {
            _ if self.failed => "failed",
            Some(finish) if self.finished == self.choices.len() => finish,
            _ => "cancelled",
        };
        let ms = self.started.elapsed().as_millis() as u64;
        let first_token_ms = self.tokens_at.map(|(first, _)| (first - self.started).as_millis() as u64);
        let tokens_per_s = self.tokens_at.and_then(|(first, last)| rate(completion_tokens, last - first));
        info!(
            parent: &self.span, ended, prompt_tokens, cached_tokens, completion_tokens, first_token_ms, tokens_per_s, ms,
            "answer"
        );
    }
}

/// Tokens per second after the first token, to two decimals.
fn rate(tokens: usize, time: Duration) -> Option<f64> {
    let rate = tokens.saturating_sub(1) as f64 / time.as_secs_f64();
    (tokens > 1 && rate.is_finite()).then(|| (rate * 100.0).round() / 100.0)
}

impl ChoiceFinish {
    /// For the log.
    fn name(&self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}
