//! `Answerer`: what answers the messages of a chat: a model that this process runs, or a server.

use anyhow::Result;
use engine::Timings;

use super::completion::ModelNames;
use super::conversation::Turn;
use super::local::LocalModel;
use super::remote::RemoteServer;
use super::settings;
use crate::interrupt::InterruptGuard;
use crate::sampling::SamplingOptions;

pub enum Answerer {
    Local(Box<LocalModel>),
    Remote(Box<RemoteServer>),
}

/// What is to be answered: the last of the turns.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    pub system: Option<&'a str>,
    pub turns: &'a [Turn],
    pub sampling: &'a SamplingOptions,
    /// Whether the model reasons; `None` leaves it to the model.
    pub thinks: Option<bool>,
}

/// The next part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    Text(String),
    Reasoning(String),
}

/// How an answer ended. Its text was given as it came.
#[derive(Debug)]
pub struct AnswerEnd {
    pub reason: EndReason,
    /// The oldest turns that did not fit.
    pub forgotten: usize,
    /// `None`: a server did not tell.
    pub timings: Option<Timings>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    Complete,
    Interrupted,
    /// Why it is not complete.
    CutOff(String),
}

impl Answerer {
    /// The model's name.
    pub fn model(&self) -> &str {
        match self {
            Self::Local(model) => model.name(),
            Self::Remote(server) => server.model(),
        }
    }

    /// Generates an answer, and gives `show` its parts as they come.
    pub fn answer(
        &mut self,
        question: Question<'_>,
        interrupt: &InterruptGuard,
        show: &mut dyn FnMut(AnswerPart) -> Result<()>,
    ) -> Result<AnswerEnd> {
        match self {
            Self::Local(model) => model.answer(question, interrupt, show),
            Self::Remote(server) => server.answer(question, interrupt, show),
        }
    }

    /// The sampling parameters that apply to the next answer.
    pub fn settings(&self, sampling: &SamplingOptions) -> String {
        settings::list(
            sampling,
            match self {
                Self::Local(model) => Some(model.sampling(sampling)),
                Self::Remote(_) => None,
            },
        )
    }

    /// Whether the model can be told to reason, as far as that is known.
    pub fn has_reasoning_switch(&self) -> bool {
        match self {
            Self::Local(model) => model.has_reasoning_switch(),
            Self::Remote(_) => true,
        }
    }

    /// What can be given to [`Self::switched`].
    pub fn model_names(&self) -> ModelNames {
        match self {
            Self::Local(_) => ModelNames::Store,
            Self::Remote(server) => ModelNames::Listed(server.models().to_vec()),
        }
    }

    /// The same with another model. The inner error says why it is the model of before; the outer one, why there is none.
    pub fn switched(self, model: &str) -> Result<(Self, Result<()>)> {
        match self {
            Self::Local(local) => {
                let (local, switched) = local.switched(model)?;
                Ok((Self::Local(Box::new(local)), switched))
            }
            Self::Remote(mut server) => {
                let switched = server.set_model(model);
                Ok((Self::Remote(server), switched))
            }
        }
    }
}
