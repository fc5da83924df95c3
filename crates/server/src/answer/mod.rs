//! Answers: from one inner form of a request to a stream of parts, whatever API it came through.
//!
//! [`Answer::begin`] writes the prompt, hands it to the engine and waits until that has accepted it, so that whatever is
//! refused is refused before a response begins. Then [`Answer::next`] gives parts as the model makes them. Dropping the
//! answer cancels what still runs.

mod ask;
mod choice;
mod constraint;
mod embed;
mod prompt;
mod reply;
mod sink;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use engine::{EventKind, FinishReason, Sampled, TenantId};
use text::Delta;
use tokio::sync::mpsc::{Receiver, channel};
use tracing::{Span, info};
use types::TokenId;

pub use ask::{Ask, CHOICES_MAX, Chat, Input, Prompt, Turn, Wishes};
pub use embed::{Embedded, embed};
pub use prompt::{chat_tokens, text_tokens};
pub use reply::{Reply, ToolCall};
pub use text::ToolChoice;

use crate::app::App;
use crate::error::ApiError;
use crate::served::Served;
use choice::Choice;
use sink::{EVENTS_MAX, Sink};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// The prompt of this choice is computed. Log probabilities of its tokens, if they were asked for: none for the first.
    Prefilled { prompt: Vec<Token> },
    /// What the model has said since: text as far as it is certain, and the tokens behind it. Either may be empty.
    Said { deltas: Vec<Delta>, tokens: Vec<Token> },
    /// The last part of this choice.
    Ended(Finish),
}

/// A token, with the log probabilities that were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: TokenId,
    pub logprobs: Option<engine::Logprobs>,
}

impl From<Sampled> for Token {
    fn from(Sampled { token, logprobs }: Sampled) -> Self {
        Self { id: token, logprobs }
    }
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model said all it had to say.
    Stop,
    /// This text came, and is not part of the answer.
    StopString(String),
    /// There was no room, or no leave, for more tokens.
    Length,
    /// The model waits for the results of its calls.
    ToolCalls,
}

/// Tokens of a request, all choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Those of the prompt that did not have to be computed.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Those of the completion that were reasoning.
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn total_tokens(&self) -> usize {
        self.prompt_tokens + self.completion_tokens
    }
}

/// The answer to an [`Ask`], as it comes.
pub struct Answer {
    served: Arc<Served>,
    events: Receiver<(usize, EventKind)>,
    /// Set when events came faster than they were read for too long.
    overrun: Arc<AtomicBool>,
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    ready: VecDeque<(usize, Part)>,
    accepted: usize,
    ended: usize,
    usage: Usage,
    failed: bool,
    /// The request's, which lasts longer than the handler's call.
    span: Span,
    begun: Instant,
}

impl Answer {
    /// Writes the prompt and gives it to the engine. An error here is one that a status can still tell.
    pub async fn begin(app: &App, served: Arc<Served>, ask: Ask, tenant: TenantId) -> Result<Self, ApiError> {
        let choices_per_prompt = ask.choices.max(1);
        let prepared = {
            let served = Arc::clone(&served);
            prompt::elsewhere(move || prompt::prepare(&served, ask, tenant)).await?
        };
        let (sender, events) = channel(EVENTS_MAX);
        let mut answer = Self {
            served,
            events,
            overrun: Arc::default(),
            choices: Vec::with_capacity(prepared.len()),
            choices_per_prompt,
            ready: VecDeque::new(),
            accepted: 0,
            ended: 0,
            usage: Usage::default(),
            failed: true,
            span: Span::current(),
            begun: Instant::now(),
        };
        for (index, (request, mut choice)) in prepared.into_iter().enumerate() {
            if answer.is_first_of_prompt(index) {
                answer.usage.prompt_tokens += request.prompt.len();
            }
            let clock = app.metrics().request(request.prompt.len());
            let satisfied = clock.satisfied();
            let sink = Sink::new(index, sender.clone(), Arc::clone(&answer.overrun), clock);
            choice.run(answer.served.service.submit(request, Box::new(sink))?, satisfied);
            answer.choices.push(choice);
        }
        drop(sender);
        while answer.accepted < answer.choices.len() {
            answer.receive().await?;
        }
        answer.failed = false;
        Ok(answer)
    }

    pub fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// What was used so far; final when all choices have ended.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The next part, and of which choice. `None` when all have ended; nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<(usize, Part), ApiError>> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(Ok(part));
            }
            if self.failed || self.ended == self.choices.len() {
                return None;
            }
            if let Err(error) = self.receive().await {
                self.failed = true;
                return Some(Err(error));
            }
        }
    }

    /// Waits for the whole answer: one reply for each choice.
    pub async fn collect(mut self) -> Result<(Vec<Reply>, Usage), ApiError> {
        let mut replies: Vec<_> = self.choices.iter().map(|_| Reply::default()).collect();
        while let Some(part) = self.next().await {
            let (choice, part) = part?;
            replies[choice].push(part);
        }
        Ok((replies, self.usage()))
    }

    /// Takes one event of the engine, and keeps the parts that it gives.
    async fn receive(&mut self) -> Result<(), ApiError> {
        let Some((index, event)) = self.events.recv().await else {
            let slow = self.overrun.load(Ordering::Relaxed);
            let reason = if slow { "the answer was not read for too long" } else { "the engine has ended" };
            return Err(ApiError::internal(reason));
        };
        let first_of_prompt = self.is_first_of_prompt(index);
        let choice = &mut self.choices[index];
        if choice.has_ended() {
            return Ok(());
        }
        match event {
            EventKind::Accepted => self.accepted += 1,
            EventKind::Refused(error) => return Err(error.into()),
            EventKind::Prefilled { cached_tokens, prompt_logprobs } => {
                if first_of_prompt {
                    self.usage.cached_tokens += cached_tokens;
                }
                let prompt = choice.prompt_tokens(prompt_logprobs);
                self.ready.push_back((index, Part::Prefilled { prompt }));
            }
            EventKind::Token(sampled) => {
                let (said, ended) = choice.token(sampled);
                self.usage.completion_tokens += 1;
                self.usage.reasoning_tokens += usize::from(choice.is_reasoning());
                self.ready.extend(said.map(|part| (index, part)));
                self.end(index, ended);
            }
            EventKind::Finished(finished) => {
                let (finish, end) = match finished.reason {
                    FinishReason::Eos(sampled) => (Finish::Stop, Some(sampled)),
                    FinishReason::Complete => (Finish::Stop, None),
                    FinishReason::Length | FinishReason::Context => (Finish::Length, None),
                    FinishReason::Cancelled => return Err(ApiError::shutting_down()),
                    FinishReason::Failed(failure) => return Err(failure.into()),
                };
                let said = choice.finish(end);
                self.ready.extend(said.map(|part| (index, part)));
                self.end(index, Some(finish));
            }
            EventKind::Embedding(_) => return Err(ApiError::internal("an embedding where text was asked for")),
        }
        Ok(())
    }

    fn end(&mut self, index: usize, finish: Option<Finish>) {
        let Some(finish) = finish else { return };
        let choice = &mut self.choices[index];
        let finish = if finish == Finish::Stop && choice.has_called() { Finish::ToolCalls } else { finish };
        choice.stop();
        self.ended += 1;
        self.ready.push_back((index, Part::Ended(finish)));
    }

    fn is_first_of_prompt(&self, index: usize) -> bool {
        index.is_multiple_of(self.choices_per_prompt)
    }
}

impl Drop for Answer {
    /// One line for each answer, however it ended.
    fn drop(&mut self) {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = self.usage;
        let ended = match (self.failed, self.ended == self.choices.len()) {
            (true, _) => "failed",
            (false, true) => "complete",
            (false, false) => "cancelled",
        };
        let ms = self.begun.elapsed().as_millis();
        info!(parent: &self.span, ended, prompt_tokens, cached_tokens, completion_tokens, ms, "answer");
    }
}
