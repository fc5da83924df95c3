//! `Conversation`: the turns of a chat, and how the next answer is printed.

use std::io::{self, stdout};

use anyhow::Result;
use text::Message;

use super::answerer::{AnswerEnd, AnswerPart, Answerer, EndReason, Question};
use super::attachment::{self, Attachment};
use crate::interrupt::InterruptGuard;
use crate::rendering::{AnswerPrinter, Rendering};
use crate::sampling::SamplingOptions;
use crate::stats::StatsOption;
use crate::terminal;

pub struct Conversation {
    pub sampling: SamplingOptions,
    pub system: Option<String>,
    /// Whether the model reasons; `None` leaves it to the model.
    pub thinks: Option<bool>,
    /// Only the last one may be without an answer, if it could not be generated.
    pub turns: Vec<Turn>,
    /// Files that are part of the next message.
    pub files: Vec<Attachment>,
    rendering: Rendering,
    stats: StatsOption,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub user: String,
    pub assistant: Option<String>,
}

impl Conversation {
    pub fn new(sampling: SamplingOptions, system: Option<String>, rendering: Rendering, stats: StatsOption) -> Self {
        Self { sampling, system, thinks: None, turns: Vec::new(), files: Vec::new(), rendering, stats }
    }

    /// Forgets what was said.
    pub fn clear(&mut self) {
        self.turns.clear();
        self.files.clear();
    }

    /// One turn: sends the user's message with its files, and prints the answer as it is generated.
    pub fn say(&mut self, message: &str, answerer: &mut Answerer) -> Result<()> {
        let attached = match attachment::attach(message, &self.files) {
            Ok(attached) => attached,
            Err(why) => {
                terminal::note(&format!("({why}: the message is not sent)"));
                return Ok(());
            }
        };
        for file in &attached.files {
            terminal::note(&format!("({})", file.description()));
        }
        for word in &attached.missing {
            terminal::note(&format!("(@{word} is no file: it is sent as text)"));
        }
        self.files.clear();
        self.turns.pop_if(|last| last.assistant.is_none());
        self.turns.push(Turn { user: attached.message, assistant: None });
        self.answer(answerer)
    }

    /// Answers the last message again.
    pub fn retry(&mut self, answerer: &mut Answerer) -> Result<()> {
        let Some(last) = self.turns.last_mut() else {
            terminal::note("(there is no message to answer)");
            return Ok(());
        };
        last.assistant = None;
        self.answer(answerer)
    }

    /// Answers the last turn. If that fails, the error is printed and the turn stays without an answer. Ctrl-C ends the
    /// answer, also while it is prepared, and not the chat.
    fn answer(&mut self, answerer: &mut Answerer) -> Result<()> {
        let interrupt = InterruptGuard::new();
        let question = Question {
            system: self.system.as_deref(),
            turns: &self.turns,
            sampling: &self.sampling,
            thinks: self.thinks,
        };
        let mut printer = AnswerPrinter::new(stdout().lock(), self.rendering);
        let (mut text, mut is_begun) = (String::new(), false);
        let answer = answerer.answer(question, &interrupt, &mut |part| {
            is_begun = true;
            match part {
                AnswerPart::Text(piece) => {
                    text.push_str(&piece);
                    Ok(printer.text(&piece)?)
                }
                AnswerPart::Reasoning(piece) => Ok(printer.reasoning(&piece)?),
            }
        });
        let is_interrupted = matches!(&answer, Ok(end) if end.reason == EndReason::Interrupted);
        if is_begun || (answer.is_ok() && !is_interrupted) {
            printer.finish()?;
        }
        match answer {
            Ok(end) => {
                self.end(end, text, is_begun);
                Ok(())
            }
            // Standard output is gone.
            Err(error) if error.is::<io::Error>() => Err(error),
            Err(error) => {
                terminal::error(&error);
                Ok(())
            }
        }
    }

    /// Keeps an answer, and tells why it is not complete and how fast it was.
    fn end(&mut self, end: AnswerEnd, text: String, is_begun: bool) {
        self.turns.drain(..end.forgotten);
        // An answer that was stopped before it began can be asked for again.
        if let Some(last) = self.turns.last_mut().filter(|_| is_begun || end.reason != EndReason::Interrupted) {
            last.assistant = Some(text);
        }
        match &end.reason {
            EndReason::Complete => {}
            EndReason::Interrupted => terminal::note("(interrupted)"),
            EndReason::CutOff(why) => terminal::note(&format!("(cut off: {why})")),
        }
        if let Some(timings) = &end.timings {
            self.stats.print(timings);
        }
    }
}

/// A conversation as a chat template and as a file have it.
pub fn messages(system: Option<&str>, turns: &[Turn]) -> Vec<Message> {
    let system = system.map(|text| Message::new("system", text));
    let turns = turns.iter().flat_map(|turn| {
        let assistant = turn.assistant.as_ref().map(|text| Message::new("assistant", text));
        [Message::new("user", &turn.user)].into_iter().chain(assistant)
    });
    system.into_iter().chain(turns).collect()
}
