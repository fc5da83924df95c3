//! `UsageError`: the command line itself is wrong. It ends the program with status 2, as the errors do that clap finds.

/// The exit status after wrong usage, by the convention of shells.
pub const EXIT_CODE: u8 = 2;

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(String);

impl UsageError {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

pub fn is_usage_error(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<UsageError>())
}
