"""Training on cached features: chat, packs, the stock model without its tower, the Trainer, evaluation."""
