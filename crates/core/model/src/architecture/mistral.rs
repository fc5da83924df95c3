//! Mistral 7B and related models: Llama's layer. In the first version every layer has a sliding window.

use kernels::Activation;

use super::{Architecture, llama};
use crate::description::{Description, DescriptionError};
use crate::metadata::{Key, ModelMetadata};

pub static MISTRAL: Architecture = Architecture {
    name: "mistral",
    aliases: &[],
    gguf: None,
    tensors: &llama::TENSORS,
    activation: Activation::Silu,
    defaults: &[("num_key_value_heads", 8)],
    tied: false,
    refine,
};

/// The window that transformers assumes when config.json does not mention one; `null` means none.
const WINDOW: usize = 4096;

fn refine(metadata: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    let window = if metadata.mentions(Key::WINDOW) { metadata.count_if(Key::WINDOW)? } else { Some(WINDOW) };
    description.set_window(window);
    Ok(())
}
