//! Whether a plan has the rows, and asks for the output, of the executor that is to run it: a whole model, or a stage of one.

use crate::executor::ExecutorError;
use crate::plan::{RequestedOutput, StepPlan};

impl StepPlan {
    /// Checks that a whole model can run this plan: its rows are tokens, all layers are to run, and no hidden states are
    /// requested.
    pub fn check_model(&self) -> Result<(), ExecutorError> {
        let is_state = |requested: &RequestedOutput| matches!(requested, RequestedOutput::States { .. });
        if self.entries().iter().any(|entry| is_state(&entry.requested)) {
            return Err(ExecutorError::Output { what: "hidden states" });
        }
        self.check_all_layers()?;
        if self.has_tokens() { Ok(()) } else { Err(ExecutorError::Input { expected: "tokens" }) }
    }

    /// Checks that an executor can run this plan that always runs all of its layers.
    pub fn check_all_layers(&self) -> Result<(), ExecutorError> {
        match self.layers() {
            Some(layers) => Err(ExecutorError::PartOfLayers { layers }),
            None => Ok(()),
        }
    }

    /// Checks that a stage with rows of this width can run this plan: its rows are activations, and nothing is requested that
    /// the head computes.
    pub fn check_stage(&self, width: usize) -> Result<(), ExecutorError> {
        let is_stage_output = |requested: &RequestedOutput| {
            matches!(requested, RequestedOutput::Nothing | RequestedOutput::States { .. })
        };
        if !self.entries().iter().all(|entry| is_stage_output(&entry.requested)) {
            return Err(ExecutorError::Output { what: "what the head computes" });
        }
        let (rows, found) = (self.rows(), self.activations().len());
        if self.has_tokens() && rows > 0 {
            return Err(ExecutorError::Input { expected: "activations" });
        }
        match rows.checked_mul(width) == Some(found) {
            true => Ok(()),
            false => Err(ExecutorError::ActivationShape { rows, width, found }),
        }
    }
}
