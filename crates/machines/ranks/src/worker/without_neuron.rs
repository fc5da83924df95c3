//! What stands for `neuron` in a build without that feature: the ops of foreign leaders are refused.

use std::time::Duration;

use super::process::RankServer;
use super::request_error::RequestError;
use crate::protocol::{ErrorKind, LineMessage as _, RankReply, RankRequest};
use collectives::GroupCollective;

/// There is never anything.
pub struct NeuronState;

impl NeuronState {
    pub fn new(_init_timeout: Duration, _collective_timeout: Duration) -> Self {
        Self
    }

    pub fn has_model(&self, _model_id: &str) -> bool {
        false
    }

    pub fn unload(&mut self, _model_id: &str) -> bool {
        false
    }

    pub fn regroup(&mut self, _collective: &GroupCollective) {}

    pub fn leave(&mut self) {}

    pub fn stepping(&self) -> Option<NoGuard> {
        None
    }

    pub fn why_ended(&self) -> Option<RequestError> {
        None
    }

    pub fn sessions(&self) -> u64 {
        0
    }

    pub fn weight_bytes(&self) -> u64 {
        0
    }

    pub fn kv_bytes(&self) -> u64 {
        0
    }
}

pub enum NoGuard {}

impl RankServer {
    pub(super) fn handle_neuron(&mut self, request: &RankRequest) -> Result<RankReply, RequestError> {
        let op = request.op();
        let why = format!(
            "this build of consort has no foreign leaders, and so no `{op}`: build it with `--features neuron`"
        );
        Err(RequestError::new(ErrorKind::UnknownOp, why))
    }
}
