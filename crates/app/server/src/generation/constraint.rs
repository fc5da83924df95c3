//! Adapts a grammar's matcher to the engine's `Constraint` trait.

use engine::{Constraint, ConstraintError, TokenMask};
use text::Matcher;
use types::TokenId;

pub struct GrammarConstraint(pub Matcher);

impl Constraint for GrammarConstraint {
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<(), ConstraintError> {
        self.0.mask(allowed.words_mut()).map_err(constraint_error)
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        self.0.accept(token).map_err(constraint_error)
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }
}

fn constraint_error(error: text::MatchError) -> ConstraintError {
    ConstraintError(error.to_string())
}
