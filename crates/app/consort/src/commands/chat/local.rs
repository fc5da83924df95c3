//! `LocalModel`: a chat's model, run by this process.

use anyhow::{Context, Result, ensure};
use engine::{Engine, Executor, SamplingParams};
use model::Checkpoint;
use serde_json::{Map, Value};
use text::{Delta, EncodeError, TemplateError};

use super::answerer::{AnswerEnd, AnswerPart, EndReason, Question};
use super::conversation::messages;
use crate::generate::{GenerationEnd, generate_reply};
use crate::interrupt::InterruptGuard;
use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{CONTEXT_DEFAULT, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::store::ModelFiles;
use crate::terminal;
use crate::text_assets::{EncodedPrompt, TextAssets};

/// One part in this many of the context is reserved for the answer.
const ANSWER_CONTEXT_DIVISOR: usize = 4;

/// The variable by which templates are told whether the model reasons.
const REASONING_SWITCH: &str = "enable_thinking";

/// How models are loaded.
pub struct LocalSetup {
    pub config: ModelConfig,
    pub threads: ThreadOption,
}

pub struct LocalModel {
    setup: LocalSetup,
    name: String,
    text: TextAssets,
    engine: Engine<Box<dyn Executor>>,
}

/// A model whose files were read, before its weights are loaded.
struct ReadModel {
    files: ModelFiles,
    checkpoint: Checkpoint,
    text: TextAssets,
    positions: usize,
}

impl LocalModel {
    /// `None` is the default model.
    pub fn load(setup: LocalSetup, model: Option<&str>) -> Result<Self> {
        let read = ReadModel::open(&setup, model)?;
        let engine = read.load(&setup)?;
        Ok(Self::new(setup, read, engine))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters of the next answer.
    pub fn sampling(&self, options: &SamplingOptions) -> SamplingParams {
        options.params(&self.text.defaults)
    }

    pub fn has_reasoning_switch(&self) -> bool {
        self.text.template.as_ref().is_some_and(|template| template.source().contains(REASONING_SWITCH))
    }

    /// Loads another model in place of this one. If that fails, loads this one again, and returns why.
    pub fn switched(self, model: &str) -> Result<(Self, Result<()>)> {
        let read = match ReadModel::open(&self.setup, Some(model)) {
            Ok(read) => read,
            Err(error) => return Ok((self, Err(error))),
        };
        let Self { setup, name, engine, .. } = self;
        // There may not be room for two.
        drop(engine);
        match read.load(&setup) {
            Ok(engine) => Ok((Self::new(setup, read, engine), Ok(()))),
            Err(error) => {
                let before =
                    Self::load(setup, Some(&name)).with_context(|| format!("{error:#}; then load {name} again"))?;
                Ok((before, Err(error)))
            }
        }
    }

    pub fn answer(
        &mut self,
        question: Question<'_>,
        interrupt: &InterruptGuard,
        show: &mut dyn FnMut(AnswerPart) -> Result<()>,
    ) -> Result<AnswerEnd> {
        let (forgotten, prompt) = match self.prompt(question, interrupt) {
            // Rendering ends early after Ctrl-C.
            _ if interrupt.is_interrupted() => {
                return Ok(AnswerEnd { reason: EndReason::Interrupted, forgotten: 0, timings: None });
            }
            prompt => prompt?,
        };
        let (max, params) = (question.sampling.max_tokens, self.sampling(question.sampling));
        let show = |delta| match delta {
            Delta::Text(text) => show(AnswerPart::Text(text)),
            Delta::Reasoning(text) => show(AnswerPart::Reasoning(text)),
            // There are no tools.
            Delta::ToolCall { .. } | Delta::Arguments { .. } => Ok(()),
        };
        let answer = generate_reply(&mut self.engine, &self.text, prompt, params, max, interrupt, show)?;
        let reason = match answer.ending {
            GenerationEnd::Stop => EndReason::Complete,
            GenerationEnd::Cancelled => EndReason::Interrupted,
            GenerationEnd::MaxTokens => EndReason::CutOff(format!("max_tokens is {}", max.unwrap_or_default())),
            GenerationEnd::ContextFull => {
                let context = self.engine.capacity().tokens_max();
                EndReason::CutOff(format!("the context of {context} tokens is full"))
            }
        };
        Ok(AnswerEnd { reason, forgotten, timings: Some(answer.timings) })
    }

    fn new(setup: LocalSetup, read: ReadModel, engine: Engine<Box<dyn Executor>>) -> Self {
        Self { setup, name: read.files.name, text: read.text, engine }
    }

    /// The prompt of the conversation, and how many of its oldest turns are not in it. If all of them leave too little of the
    /// context for an answer, the oldest ones are left out.
    fn prompt(&self, question: Question<'_>, interrupt: &InterruptGuard) -> Result<(usize, EncodedPrompt)> {
        let positions = self.engine.capacity().tokens_max();
        let tokens_max = positions - positions / ANSWER_CONTEXT_DIVISOR;
        let thinks = question.thinks.map(|thinks| (REASONING_SWITCH.to_owned(), Value::from(thinks)));
        let variables: Map<String, Value> = thinks.into_iter().collect();
        let render = |first: usize| {
            ensure!(!interrupt.is_interrupted(), "interrupted");
            self.text.prompt(&messages(question.system, &question.turns[first..]), variables.clone())
        };
        let (first, prompt) = fit(question.turns.len(), tokens_max, render, |prompt| prompt.tokens.len())?;
        if first > 0 {
            let oldest = if first == 1 { "turn is".to_owned() } else { format!("{first} turns are") };
            terminal::note(&format!("(the conversation is too long: its oldest {oldest} forgotten)"));
        }
        Ok((first, prompt))
    }
}

impl ReadModel {
    fn open(setup: &LocalSetup, model: Option<&str>) -> Result<Self> {
        let files = setup.config.resolve(model)?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let text = TextAssets::of(&files, &checkpoint).context("read the tokenizer and template")?;
        let positions = setup.config.execution.context(&checkpoint, CONTEXT_DEFAULT)?;
        Ok(Self { files, checkpoint, text, positions })
    }

    fn load(&self, setup: &LocalSetup) -> Result<Engine<Box<dyn Executor>>> {
        let capacity = RequestedCapacity::full(1, self.positions, 1);
        let executor: Box<dyn Executor> =
            setup.config.load(&self.files.path, &self.checkpoint, &setup.threads, capacity)?;
        Ok(Engine::new(executor, setup.config.execution.chunk()))
    }
}

/// The first turn of the longest end of a conversation that has at most `tokens_max` tokens, and its prompt. If none has,
/// the last turn. `render` makes the prompt from a first turn on. It is called seldom, because it takes long for many turns.
fn fit<P>(
    turns: usize,
    tokens_max: usize,
    mut render: impl FnMut(usize) -> Result<P>,
    tokens: impl Fn(&P) -> usize,
) -> Result<(usize, P)> {
    let (mut first, mut end) = (0, turns.saturating_sub(1));
    let mut middle = 0;
    let mut fitting = None;
    while first < end {
        match render(middle) {
            Ok(prompt) if tokens(&prompt) <= tokens_max => (end, fitting) = (middle, Some(prompt)),
            Err(error) if !is_too_long(&error) => return Err(error),
            _ => first = middle + 1,
        }
        middle = first.midpoint(end);
    }
    let prompt = fitting.map_or_else(|| render(end), Ok)?;
    Ok((end, prompt))
}

/// Whether fewer turns may succeed.
fn is_too_long(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(TemplateError::Exceeded(_)))
        || matches!(error.downcast_ref(), Some(EncodeError::TooLong { .. }))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;

    use super::*;

    /// Each turn has one token, and more than `possible` turns exceed the limits of the template.
    fn check(turns: usize, tokens_max: usize, possible: usize, expected: usize) {
        let calls = Cell::new(0);
        let render = |first: usize| {
            calls.set(calls.get() + 1);
            if turns - first > possible {
                bail!(TemplateError::Exceeded("it takes more than 7 steps".to_owned()));
            }
            Ok(turns - first)
        };
        let (first, tokens) = fit(turns, tokens_max, render, |&tokens| tokens).unwrap();
        assert_eq!((first, tokens), (expected, turns - expected), "{turns} turns");
        assert!(calls.get() <= 12, "{} renderings of {turns} turns", calls.get());
    }

    #[test]
    fn as_few_turns_as_possible_are_forgotten_but_never_the_last() {
        check(1, 10, 10, 0);
        check(1, 0, 10, 0);
        check(10, 10, 10, 0);
        check(11, 10, 100, 1);
        check(1000, 10, 1000, 990);
        check(1000, 10, 500, 990);
        check(1000, 100, 7, 993);
        check(1000, 0, 7, 999);
    }

    #[test]
    fn other_errors_and_a_last_turn_that_is_too_long_are_told() {
        let refuse = |_| -> Result<usize> { bail!(TemplateError::Refused("no".to_owned())) };
        assert!(fit(9, 10, refuse, |&tokens| tokens).unwrap_err().to_string().contains("refuses"));
        let exceed = |_| -> Result<usize> { bail!(TemplateError::Exceeded("no".to_owned())) };
        assert!(fit(9, 10, exceed, |&tokens| tokens).unwrap_err().to_string().contains("exceeds"));
    }
}
