def forward(x, result):
    result.copy_(2 * x)
