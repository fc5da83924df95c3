//! From a [`GenerationRequest`] to requests for the engine: renders the template and encodes the text. The grammar is compiled
//! in between, elsewhere.

use std::sync::Arc;

use engine::{Constraint, Request, RequestKind, TenantId, fresh_seed};
use text::{
    Grammar, Matcher, Message, RenderOptions, ReplyParser, SpecialTokens, StopStrings, TemplateError, Tool, ToolChoice,
};
use types::TokenId;

use super::constraint::GrammarConstraint;
use super::decoder::ChoiceDecoder;
use super::request::{CHOICES_MAX, ChatInput, GenerationInput, GenerationRequest, Prompt, PromptEnding};
use super::truncation;
use crate::error::ApiError;
use crate::served_model::ServedModel;

/// A conversation that is truncated leaves one part in this many of the context for the output, unless less is asked for.
const OUTPUT_SHARE: usize = 8;

/// A text whose tokens are counted may be this many times as long as the context.
const COUNTED_CONTEXTS_MAX: usize = 16;

/// A request that can be given to the engine once its grammar is compiled.
pub(super) struct EncodedRequest {
    request: GenerationRequest,
    input: EncodedInput,
    stops: StopStrings,
}

impl EncodedRequest {
    pub fn new(model: &ServedModel, mut request: GenerationRequest) -> Result<Self, ApiError> {
        let input = std::mem::replace(&mut request.input, GenerationInput::Prompts(Vec::new()));
        let mut input = EncodedInput::new(model, input, request.grammar.take(), request.tokens_max)?;
        if !request.prefix.is_empty() {
            input.prompts.iter_mut().for_each(|prompt| *prompt = join(model, &request.prefix, prompt));
        }
        if request.choices == 0 || input.prompts.len().saturating_mul(request.choices) > CHOICES_MAX {
            return Err(ApiError::invalid("n", format!("there must be 1 to {CHOICES_MAX} choices")));
        }
        let stops = StopStrings::new(std::mem::take(&mut request.stop));
        let stops = stops.map_err(|error| ApiError::invalid("stop", error.to_string()))?;
        Ok(Self { request, input, stops })
    }

    /// Choices for each prompt.
    pub fn choices(&self) -> usize {
        self.request.choices
    }

    pub fn grammar(&self) -> Option<&RequestGrammar> {
        self.input.grammar.as_ref()
    }

    /// An engine request and a decoder for each choice, prompt after prompt. `matcher` is that of the grammar.
    pub fn requests(
        &self,
        model: &ServedModel,
        tenant: TenantId,
        matcher: Option<&Matcher>,
    ) -> Vec<(Request, ChoiceDecoder)> {
        let Self { request, input, stops } = self;
        let model_eos: &[TokenId] = if request.ignore_eos { &[] } else { model.tokenizer.eos_ids() };
        let eos: Arc<[TokenId]> = model_eos.iter().chain(&request.stop_tokens).copied().collect();
        let sampling_defaults = model.defaults.sampling();
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        let special = if request.show_special { SpecialTokens::Show } else { SpecialTokens::Hide };
        let mut prepared = Vec::with_capacity(input.prompts.len() * request.choices);
        for prompt in &input.prompts {
            for index in 0..request.choices {
                let detokenizer = model.tokenizer.detokenizer(special);
                let mut decoder = match &input.reply {
                    // As in OpenAI's completions: a request for one token returns one log probability, even if that token
                    // ends the text.
                    None => ChoiceDecoder::new(detokenizer, stops.clone(), None).with_end_token(true),
                    Some(reply) => {
                        let parser =
                            ReplyParser::new(&model.format, Arc::clone(&reply.tools)).after_prompt(&reply.prompt);
                        let detokenizer = detokenizer.with_shown_tokens(model.markers.clone());
                        ChoiceDecoder::new(detokenizer, stops.clone(), Some(parser))
                            .with_reasoning(model.format.opens_reasoning(&reply.prompt))
                            .with_end_token(request.return_tokens)
                            .with_one_call_only(reply.single_tool_call)
                    }
                };
                decoder = decoder.with_grammar(input.grammar.as_ref().map(|grammar| grammar.param));
                if request.logprobs.is_some() || request.return_tokens {
                    decoder = decoder.with_tokens();
                }
                if request.prompt_logprobs.is_some() || request.return_tokens {
                    decoder = decoder.with_prompt(prompt.clone());
                }
                let seed = seed.wrapping_add(index as u64);
                let constraint =
                    matcher.map(|matcher| Box::new(GrammarConstraint(matcher.fork())) as Box<dyn Constraint>);
                let engine_request = Request {
                    prompt: prompt.clone(),
                    sampling: request.sampling.params(&sampling_defaults, request.logprobs, seed),
                    tokens_max: request.tokens_max.unwrap_or(usize::MAX),
                    tokens_min: request.tokens_min,
                    eos: Arc::clone(&eos),
                    tenant,
                    constraint,
                    prompt_logprobs: request.prompt_logprobs,
                    kind: RequestKind::Generate,
                };
                prepared.push((engine_request, decoder));
            }
        }
        prepared
    }
}

/// A request's input as tokens, with its grammar and the context for parsing the output.
struct EncodedInput {
    prompts: Vec<Vec<TokenId>>,
    grammar: Option<RequestGrammar>,
    /// `None`: all output is text.
    reply: Option<ReplyContext>,
}

/// A grammar, and the field of the request that it comes from.
pub(super) struct RequestGrammar {
    pub grammar: Grammar,
    pub param: &'static str,
}

/// The context for decoding the output of a chat.
struct ReplyContext {
    prompt: String,
    tools: Arc<[Tool]>,
    single_tool_call: bool,
}

impl EncodedInput {
    fn new(
        model: &ServedModel,
        input: GenerationInput,
        grammar: Option<Grammar>,
        tokens_max: Option<usize>,
    ) -> Result<Self, ApiError> {
        let grammar = grammar.map(|grammar| RequestGrammar { grammar, param: "response_format" });
        let chat = match input {
            GenerationInput::Chat(chat) => chat,
            GenerationInput::Prompts(prompts) => {
                let encode = |prompt| encode(model, prompt, "prompt");
                let prompts = prompts.into_iter().map(encode).collect::<Result<_, _>>()?;
                return Ok(Self { prompts, grammar, reply: None });
            }
        };
        chat.tools.check_choice(&chat.tool_choice)?;
        let render = |messages: &[Message]| {
            let prompt = render_chat(model, &chat, messages)?;
            let tokens = encode_if_fits(model, &prompt, false, "messages")?;
            Ok((prompt, tokens))
        };
        let (prompt, tokens) = if chat.truncates {
            let output = tokens_max.unwrap_or(usize::MAX).clamp(1, (model.context / OUTPUT_SHARE).max(1));
            truncation::fit(&chat.messages, model.context.saturating_sub(output), render)?
        } else {
            render(&chat.messages)?
        };
        let tools: Arc<[Tool]> =
            if chat.tool_choice == ToolChoice::None { Arc::new([]) } else { chat.tools.callable() };
        let single_tool_call = chat.is_single_tool_call();
        let calls = model.format.tool_grammar(&model.tokenizer, &tools, &chat.tool_choice, !single_tool_call);
        let calls = calls.map_err(|error| ApiError::invalid("tools", error_chain(&error)))?;
        // A forced tool call takes precedence over a response format; one that the model may make does not.
        let calls = calls.filter(|_| grammar.is_none() || chat.tool_choice != ToolChoice::Auto);
        let grammar = calls.map(|grammar| RequestGrammar { grammar, param: "tools" }).or(grammar);
        let grammar = grammar.map(|RequestGrammar { grammar, param }| RequestGrammar {
            grammar: model.format.reasoned(grammar, &prompt),
            param,
        });
        Ok(Self { prompts: vec![tokens], grammar, reply: Some(ReplyContext { prompt, tools, single_tool_call }) })
    }
}

/// An error with its causes, on one line.
pub(super) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// The tokens of a conversation's prompt, to count them.
pub fn chat_tokens(model: &ServedModel, chat: &ChatInput) -> Result<Vec<TokenId>, ApiError> {
    encode_to_count(model, &render_chat(model, chat, &chat.messages)?, false, "messages")
}

/// The tokens of a text, to count them. `add_special` adds the special tokens that the model expects around it.
pub fn text_tokens(model: &ServedModel, text: &str, add_special: bool) -> Result<Vec<TokenId>, ApiError> {
    encode_to_count(model, text, add_special, "prompt")
}

/// The tokens of a text that need not fit the context. Encoding takes long, so a text that is far too long is refused.
fn encode_to_count(model: &ServedModel, text: &str, add_special: bool, param: &str) -> Result<Vec<TokenId>, ApiError> {
    let (tokens_min, max) = (model.tokenizer.tokens_min(text), model.context.saturating_mul(COUNTED_CONTEXTS_MAX));
    if tokens_min > max {
        let message = format!("the text has at least {tokens_min} tokens: more than {max} are not counted");
        return Err(ApiError::invalid(param, message).code("context_length_exceeded"));
    }
    encode_text(model, text, add_special, param)
}

/// The first `tokens_max` tokens of a text, as the model expects a whole text.
pub fn truncated_tokens(model: &ServedModel, text: &str, tokens_max: usize) -> Result<Vec<TokenId>, ApiError> {
    // Encodes no more of a long text than it needs.
    let (mut end, mut bytes) = (text.len(), tokens_max);
    while bytes < text.len() {
        let part = text.floor_char_boundary(bytes);
        if model.tokenizer.tokens_min(&text[..part]) > tokens_max {
            end = part;
            break;
        }
        bytes = bytes.saturating_mul(2).max(1);
    }
    let mut tokens = encode_text(model, &text[..end], true, "input")?;
    tokens.truncate(tokens_max);
    Ok(tokens)
}

/// The prompt of these messages as text, with the settings of a conversation.
fn render_chat(model: &ServedModel, chat: &ChatInput, messages: &[Message]) -> Result<String, ApiError> {
    let Some(template) = &model.template else {
        let message = "this model has no chat template: it continues texts, at /v1/completions";
        return Err(ApiError::invalid("messages", message).code("no_chat_template"));
    };
    // Messages without content are left out.
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "no message has content"));
    }
    let tools = if chat.tool_choice == ToolChoice::None { Vec::new() } else { chat.tools.definitions() };
    let mut extra = chat.reasoning.template_args();
    extra.extend(chat.template_args.clone());
    let options = RenderOptions {
        add_generation_prompt: chat.ending == PromptEnding::GenerationPrompt,
        continue_final_message: chat.ending == PromptEnding::ContinueFinalMessage,
        tools,
        extra,
        now: None,
    };
    template.render(messages, &options).map_err(|error| match error {
        TemplateError::Refused(_) => ApiError::invalid("messages", error.to_string()),
        TemplateError::Variables(_) if !chat.template_args.is_empty() => {
            ApiError::invalid("chat_template_kwargs", error.to_string())
        }
        _ => ApiError::internal(error.to_string()).code("chat_template_failed"),
    })
}

/// `prompt` after `prefix`, without the begin tokens that only the first of them may have.
fn join(model: &ServedModel, prefix: &[TokenId], prompt: &[TokenId]) -> Vec<TokenId> {
    let begin = model.tokenizer.prefix_ids();
    [prefix, prompt.strip_prefix(begin).unwrap_or(prompt)].concat()
}

/// The tokens of a plain prompt, without a template.
pub(super) fn encode(model: &ServedModel, prompt: Prompt, param: &str) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => Ok(tokens),
        Prompt::Text(text) => encode_if_fits(model, &text, true, param),
    }
}

/// The tokens of a text to compute. One that cannot fit the context is refused before it is encoded, which takes long.
fn encode_if_fits(model: &ServedModel, text: &str, add_special: bool, param: &str) -> Result<Vec<TokenId>, ApiError> {
    let tokens_min = model.tokenizer.tokens_min(text);
    if tokens_min >= model.context {
        return Err(ApiError::context_exceeded(tokens_min, model.context, true));
    }
    encode_text(model, text, add_special, param)
}

fn encode_text(model: &ServedModel, text: &str, add_special: bool, param: &str) -> Result<Vec<TokenId>, ApiError> {
    model.tokenizer.encode(text, add_special).map_err(|error| ApiError::invalid(param, error.to_string()))
}
