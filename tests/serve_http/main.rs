//! The serving routes: vLLM's shapes, key for key, over a model that knows two replies by heart.

mod chat;
mod other;
mod support;
