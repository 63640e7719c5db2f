//! What can go wrong with a request or a publication.

/// Errors of the engine. Each names the limit and what to do.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The prompt alone is longer than the context.
    #[error(
        "This model's maximum context length is {max_context} tokens. However, your request has {prompt_tokens} input \
         tokens. Please reduce the length of the input messages."
    )]
    PromptTooLong { prompt_tokens: usize, max_context: usize },
    /// Prompt and completion together are longer than the context.
    #[error(
        "This model's maximum context length is {max_context} tokens. However, you requested {max_tokens} output \
         tokens and your prompt contains {prompt_tokens} input tokens, for a total of {} tokens. Please reduce the \
         length of the input prompt or the number of requested output tokens.",
        max_tokens + prompt_tokens
    )]
    ContextExceeded { prompt_tokens: usize, max_tokens: usize, max_context: usize },
    /// Nothing to continue.
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    /// An id that the model does not have.
    #[error("token id {token} is outside the model's vocabulary of {vocab_size}")]
    TokenOutOfRange { token: u32, vocab_size: usize },
    /// A sampling parameter that means nothing.
    #[error("{name} = {value} is not usable: {remedy}")]
    Sampling { name: &'static str, value: String, remedy: &'static str },
    /// Too many requests wait already.
    #[error("{limit} requests are waiting already; try again later, or raise max_queue")]
    QueueFull { limit: usize },
    /// The engine's thread has ended.
    #[error("the engine has ended")]
    Ended,
    /// A publication that does not fit the running engine.
    #[error("the published model differs from the running one in {what}; start a new engine for it")]
    OtherArchitecture { what: &'static str },
    /// Options that cannot work.
    #[error("engine option {name} = {value} is not usable: {remedy}")]
    Option { name: &'static str, value: usize, remedy: String },
    /// More keys and values than there is memory for.
    #[error(
        "{cause}: lower max_context = {max_context} (--max-context, policy.max_context_tokens) or max_batch = \
         {max_batch} (--max-batch, policy.max_batch)"
    )]
    Cache { max_context: usize, max_batch: usize, cause: crate::model::ModelError },
    /// The system gave no thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
}
