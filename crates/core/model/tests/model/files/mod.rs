//! Tests of the file readers with valid, invalid and hostile files.

mod gguf;
mod mutations;
mod real;
mod safetensors;
mod split;
mod truncated;

/// The full error message: the error with all its causes.
fn message(error: impl Into<Box<dyn std::error::Error>>) -> String {
    let error = error.into();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
