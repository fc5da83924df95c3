//! The name of a model: a word, or `-m` for those who write it as an option.

use clap::Args;

use super::heading;

/// The model of a command that has a default.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelName {
    /// Hub model (owner/name, owner/name:Q4_K_M), folder or .gguf file [default: a small model]
    #[arg(conflicts_with = "model_option")]
    model: Option<String>,
    #[command(flatten)]
    option: ModelOption,
}

/// `--model`, of a command that reads its words by itself.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelOption {
    /// The same as MODEL
    #[arg(short, long = "model", value_name = "MODEL", help_heading = heading::MODEL)]
    pub model_option: Option<String>,
}

impl ModelName {
    /// `None` is the default model.
    pub fn get(&self) -> Option<&str> {
        self.model.as_deref().or(self.option.model_option.as_deref())
    }
}
