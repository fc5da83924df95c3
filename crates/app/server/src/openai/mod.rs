//! OpenAI's API: chat, completions, embeddings, models; and vLLM's `/tokenize`.

mod chat;
mod chunk;
mod common_fields;
mod completions;
mod embeddings;
mod models;
mod tokenize;
mod usage;

use axum::Router;
use utoipa::OpenApi;

pub use chat::{ChatTool, LogprobsBody, TokenLogprob, tools};

use crate::app::SharedApp;
use crate::error::OpenAiErrorBody;

pub fn router() -> Router<SharedApp> {
    Router::new()
        .merge(chat::router())
        .merge(completions::router())
        .merge(embeddings::router())
        .merge(models::router())
        .merge(tokenize::router())
}

#[derive(OpenApi)]
#[openapi(
    paths(
        chat::complete,
        completions::complete,
        embeddings::create,
        models::list,
        models::one,
        models::load,
        models::unload,
        tokenize::tokenize,
        tokenize::detokenize,
        tokenize::describe,
    ),
    components(schemas(OpenAiErrorBody))
)]
pub struct OpenAiPaths;
